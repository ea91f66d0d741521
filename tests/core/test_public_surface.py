"""The names and signatures that users meet: a change here is a decision. And what importing them costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import art_core

SIGNATURES = {
    "Model": (
        "(*, name, project, entity=None, config=None, inference_api_key=None, inference_base_url=None, "
        "inference_model_name=None, base_path='.art', report_metrics=None)"
    ),
    "TrainableModel": (
        "(*, name, project, base_model, entity=None, config=None, base_path='.art', report_metrics=None)"
    ),
    "TrainableModel.register": "(self, backend=None)",
    "TrainableModel.openai_client": "(self, *, sync=False)",
    "TrainableModel.http_client": "(self, *, sync=False)",
    "TrainableModel.get_inference_name": "(self, step=None)",
    "TrainableModel.litellm_completion_params": "(self, step=None)",
    "TrainableModel.served": "(self, step)",
    "TrainableModel.get_step": "(self)",
    "TrainableModel.log": "(self, trajectories=None, split='val', *, metrics=None, step=None)",
    "TrainableModel.train": "(self, groups, **config)",
    "TrainableModel.train_sft": "(self, trajectories, **config)",
    "TrainableModel.delete_checkpoints": (
        "(self, best_checkpoint_metric='val/reward', *, keep_recent=1, higher_is_better=True, dry_run=False)"
    ),
    "TrainableModel.set_temperature_annealer": "(self, annealer)",
    "LinearTemperatureAnnealer": "(start, end, steps)",
    "TrainableModel.read_state": "(self)",
    "TrainableModel.merge_state": "(self, state)",
    "TrainableModel.overwrite_state": "(self, state)",
    "Trajectory.count": "(self, metric, by=1)",
    "Trajectory.finish": "(self)",
    "Trajectory.log": "(self, message)",
    "Trajectory.messages": "(self)",
    "Trajectory.for_logging": "(self)",
    "Trajectory.track_duration": "(self, name)",
    "TrajectoryGroup": "(trajectories=(), *, exceptions=(), metadata=None, metrics=None, logs=None)",
    "auto_trajectory": "(*, required=False)",
    "capture_auto_trajectory": "(coroutine)",
    "capture_yielded_trajectory": "(coroutine)",
    "yield_trajectory": "(trajectory)",
    "role": "(name)",
    "train_agent": (
        "(agent, scenarios, reward, backend, *, model, steps, group_size=8, scenarios_per_step=4, score_group=None, "
        "validation=(), train_only=None, max_exceptions=0.25, concurrency=32, seed=0, **train_options)"
    ),
    "gather_trajectories": "(trajectories, *, pbar_desc='gather', max_exceptions=0)",
    "gather_trajectory_groups": (
        "(groups, *, pbar_desc='gather', max_exceptions=0, max_metrics=None, after_each=None)"
    ),
    "trajectory_group_batches": (
        "(groups, *, batch_size, max_batch_exceptions=0, max_concurrent_batches=4, skip_batches=0)"
    ),
}
FIELDS = {
    "messages_and_choices": [],
    "tools": None,
    "additional_histories": [],
    "reward": 0.0,
    "role_rewards": {},
    "initial_policy_version": None,
    "final_policy_version": None,
    "metrics": {},
    "metadata": {},
    "logs": [],
}


def plain_signature(path: str) -> str:
    target = art_core
    for part in path.split("."):
        target = getattr(target, part)
    signature = inspect.signature(target.__init__ if inspect.isclass(target) else target)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    if inspect.isclass(target):
        parameters = parameters[1:]
    return str(inspect.Signature(parameters))


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str):
    assert plain_signature(path) == SIGNATURES[path]


def test_trajectory_fields_and_defaults():
    trajectory = art_core.Trajectory().model_dump()
    assert {name: trajectory[name] for name in FIELDS} == FIELDS
    assert set(trajectory) == {*FIELDS, "start_time"}


def test_every_public_name_resolves_and_type_checkers_see_the_same_names():
    for name in art_core.__all__:
        assert getattr(art_core, name) is not None
    assert set(art_core._HOME_OF) == set(art_core.__all__)
    assert set(art_core.__all__) <= set(dir(art_core))
    tree = ast.parse(Path(art_core.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    static = {alias.name: node.module for node in guarded.body for alias in node.names}  # type: ignore[attr-defined]
    assert static == {name: f"art_core.{home}" for name, home in art_core._HOME_OF.items()}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = art_core.nothing


PROBE = """
import sys, time
before = set(sys.modules)
started = time.perf_counter()
import art_core
print(time.perf_counter() - started)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
import art_core.agent_loop, art_core.auto, art_core.capture, art_core.gather, art_core.models, art_core.storage
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
HEAVY = {"torch", "openai", "litellm", "langchain", "langchain_core", "crewai", "google", "fastmcp", "transformers"}


def test_import_costs_next_to_nothing():
    runs = [
        subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout.splitlines()
        for _run in range(3)
    ]
    assert min(float(lines[0]) for lines in runs) < 0.3
    assert not HEAVY & set(runs[0][1].split())
    assert not HEAVY & set(runs[0][2].split()), "not even all of the client needs a framework to be imported"
