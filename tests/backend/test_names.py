"""The names of `art_backend` and `art_backend.engine` that users meet."""

from __future__ import annotations

import inspect

import art_backend
import art_backend.engine
from art_backend import TransformersOptions, VLLMOptions
from art_backend.engine import TransformersEngine
from art_backend.vllm import VLLMEngine


def test_every_name_resolves() -> None:
    assert set(art_backend._HOME) == set(art_backend.__all__) == set(dir(art_backend))
    for name in art_backend.__all__:
        assert getattr(art_backend, name).__name__ == name
    assert art_backend.engine.TransformersOptions is TransformersOptions


def test_options_are_arguments_of_their_engine_with_its_defaults() -> None:
    for options, engine in ((TransformersOptions, TransformersEngine), (VLLMOptions, VLLMEngine)):
        taken = inspect.signature(engine).parameters
        for name, given in inspect.signature(options).parameters.items():
            assert taken[name].default == given.default, name
