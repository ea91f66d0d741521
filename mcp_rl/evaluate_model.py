"""`mcp-rl eval`: score any model, trained here or not, on the held-out scenarios of a file."""

from __future__ import annotations

from pathlib import Path

from art_core.errors import ConfigError
from mcp_rl.client import MCPServer
from mcp_rl.config import require_local
from mcp_rl.console import Display, quiet_libraries
from mcp_rl.evaluate import evaluate
from mcp_rl.records import EvalRecord, RunFolder, Stage
from mcp_rl.rollout import Agent
from mcp_rl.scenarios import load


def parse_model(text: str) -> tuple[str, Path | None, int]:
    """`RUN[@STEP]` or a base model -> (base model, adapter folder or None, policy version).

    Raises:
        ConfigError: the run has no such step.
    """
    name, _, step = text.partition("@")
    folder = RunFolder(Path(name))
    if (config := folder.read_config()) is None:
        return text, None, 0
    from art_backend.checkpoints import Checkpoints

    checkpoints = Checkpoints(folder.model_folder / "checkpoints")
    steps = checkpoints.steps()
    if not steps or (step and (not step.isdigit() or int(step) not in steps)):
        raise ConfigError(
            f"{name} has no policy version {step or '(none at all)'}: it has {', '.join(map(str, steps)) or 'none'}."
        )
    version = int(step) if step else steps[-1]
    return str(config["model"]), checkpoints.path(version), version


async def evaluate_model(
    server: MCPServer,
    model: str,
    scenarios: Path,
    *,
    samples: int,
    seed: int,
    isolate: bool,
    display: Display,
) -> EvalRecord:
    """Serve `model` and attempt every held-out scenario (all of them, if the file marks none as held out)."""
    require_local()
    base_model, adapter, step = parse_model(model)
    loaded = load(scenarios)
    chosen = [scenario for scenario in loaded if scenario.split == "held_out"] or loaded
    async with server:
        from art_backend.base_model import load_tokenizer, resolve
        from art_backend.engine import TransformersEngine
        from art_backend.threads import in_own_thread
        from art_core.models import Model

        quiet_libraries()
        path = await in_own_thread(resolve, base_model)
        tokenizer = await in_own_thread(load_tokenizer, path)
        engine = TransformersEngine(base_model)
        await engine.start()
        try:
            name = f"agent@{step}"
            await engine.publish(name, adapter)
            client = Model(
                name="agent", project="mcp-rl", inference_base_url=engine.base_url, inference_api_key=engine.api_key
            ).openai_client()
            agent = Agent(
                client,
                name,
                server.tools,
                lambda text: tokenizer.encode(text, add_special_tokens=False),
                tokenizer.decode,
            )
            return await evaluate(
                agent,
                server,
                chosen,
                stage=Stage.AFTER if adapter else Stage.BASE,
                step=step,
                samples=samples,
                seed=seed,
                display=display,
                isolate=isolate,
            )
        finally:
            await engine.close()
