"""Temperatures over a run, by hand."""

import pytest

from art_core import LinearTemperatureAnnealer
from art_core.errors import ConfigError


def test_it_goes_in_equal_notches_and_stays():
    annealer = LinearTemperatureAnnealer(start=1.2, end=0.4, steps=4)
    assert [annealer.temperature(step) for step in range(7)] == pytest.approx([1.2, 1.0, 0.8, 0.6, 0.4, 0.4, 0.4])
    assert annealer.temperature(4) == 0.4
    assert LinearTemperatureAnnealer(0.0, 1.0, 1).temperature(1) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-0.1, 1, 3), "start=-0.1"), ((1, float("nan"), 3), "end=nan"), ((1, 1, 0), "steps=0")],
)
def test_what_is_no_temperature_is_refused(arguments: tuple[float, float, int], message: str):
    with pytest.raises(ConfigError, match=message):
        LinearTemperatureAnnealer(*arguments)
