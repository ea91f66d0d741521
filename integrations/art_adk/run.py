"""`rollout`: one ADK run, from a message to the trajectory."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from google.adk.agents.base_agent import BaseAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps.app import App
from google.adk.runners import InMemoryRunner, Runner
from google.genai.types import Content, Part

from art_adk.plugin import RolloutPlugin
from art_core.auto import auto_trajectory, capture_auto_trajectory
from art_core.types import Trajectory


async def rollout(
    agent: BaseAgent | App | Runner,
    message: str | Content,
    *,
    state: dict[str, Any] | None = None,
    run_config: RunConfig | None = None,
) -> Trajectory:
    """Send `message` to the agent in a new session (with `state`) and return what happens until its answer. Any number may
    run side by side on one agent. Within a rollout (`train_agent`, `capture_auto_trajectory`) that one is continued.

    A `RolloutPlugin` is added where none is. Whatever ends the run is raised, with the partial `trajectory` on it."""
    runner = _runner(agent)
    content = Content(role="user", parts=[Part(text=message)]) if isinstance(message, str) else message

    async def run() -> None:
        session = await runner.session_service.create_session(app_name=runner.app_name, user_id="user", state=state)
        events = runner.run_async(user_id="user", session_id=session.id, new_message=content, run_config=run_config)
        async with aclosing(events):
            async for _event in events:
                pass

    if auto_trajectory() is None:
        return await capture_auto_trajectory(run())
    await run()
    return auto_trajectory(required=True)


def _runner(agent: BaseAgent | App | Runner) -> Runner:
    """Never closed: that would close toolsets of the agent, which other rollouts are using."""
    app = App(name="rollout", root_agent=agent) if isinstance(agent, BaseAgent) else agent
    runner = app if isinstance(app, Runner) else InMemoryRunner(app=app)
    if not any(isinstance(plugin, RolloutPlugin) for plugin in runner.plugin_manager.plugins):
        runner.plugin_manager.register_plugin(RolloutPlugin())
    return runner
