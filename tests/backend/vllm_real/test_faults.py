"""The real vLLM is killed, stopped and orphaned: what was asked is answered, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI

from art_backend.vllm import VLLMEngine
from tests.backend.engine_models import save_adapter
from tests.backend.test_vllm_engine import gone, processes, until
from tests.backend.vllm_real.asking import ask, assert_exact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def core_of(engine: VLLMEngine) -> psutil.Process:
    """The process that schedules: it dies, and the HTTP server before it lives on."""
    (core,) = [p for p in processes(engine) if "EngineCor" in p.name() or "EngineCor" in " ".join(p.cmdline())]
    return core


async def test_an_engine_killed_mid_rollout_and_mid_swap_is_replaced(
    engine: VLLMEngine, client: AsyncOpenAI, model: Any, tmp_path: Path
) -> None:
    old, new = (save_adapter(model, tmp_path / f"a{seed}", seed=seed) for seed in (3, 4))
    await engine.publish("killed@3", tmp_path / "a3")
    asking = [asyncio.ensure_future(ask(client, "killed@3", temperature=1.0, max_tokens=300)) for _ in range(6)]
    api = engine._running()._api
    await until(lambda: api.in_flight().get("killed@3") == len(asking))
    restarts, family = engine.restarts, processes(engine)
    core = core_of(engine)
    core.suspend()  # so that the swap is under way, and does not get done, when the engine is killed
    swap = asyncio.ensure_future(engine.publish("killed@4", tmp_path / "a4"))
    await asyncio.sleep(0.5)
    assert not swap.done()
    assert not any(task.done() for task in asking)
    core.send_signal(signal.SIGKILL)
    for reply in await asyncio.gather(*asking):
        assert reply.model == "killed@3"
        assert_exact(old, reply)
    await swap
    newest = await ask(client, "killed")
    assert newest.model == "killed@4"
    assert_exact(new, newest)
    assert engine.restarts == restarts + 1
    assert gone(family)


async def test_an_engine_that_hangs_is_replaced(engine: VLLMEngine, client: AsyncOpenAI, model: Any) -> None:
    await engine.publish("hung@0", None)
    restarts, family = engine.restarts, processes(engine)
    core_of(engine).suspend()  # the HTTP server goes on answering for it: /health says that all is well
    asking = asyncio.ensure_future(ask(client, "hung", timeout=600))
    await until(lambda: engine.restarts == restarts + 1, seconds=120)
    assert_exact(model, await asking)
    assert gone(family)


PARENT = """
import asyncio, json, sys
from art_backend.vllm import VLLMEngine
async def main():
    engine = VLLMEngine(sys.argv[1], dtype="float32", max_model_len=512, log_file=sys.argv[2])
    await engine.start()
    print(json.dumps(engine._running()._server.group), flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def test_a_parent_killed_with_9_leaves_no_orphan(engine: VLLMEngine, base: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(base), str(tmp_path / "vllm.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        group = json.loads(parent.stdout.readline())
        family = [process for process in psutil.process_iter() if os.getpgid(process.pid) == group]
        assert any("VLLM" in process.name() for process in family)
        parent.kill()
    assert gone(family)
