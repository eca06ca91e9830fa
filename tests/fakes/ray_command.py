"""``ray``, the command, but raylets know the ports of their agents: ``-m tests.fakes.ray_command``."""

from __future__ import annotations

from typing import Any


def wait_for_no_agent() -> None:
    """Tell raylets the ports of their agents; Ray keeps one of them from them.

    Without it they wait for files with the ports that the agents have chosen, and abort after 15
    seconds, which no setting changes. On a busy machine the agents, Python programs with many
    imports, take longer to start.
    """
    from ray._private import ray_constants, services

    start = services.start_ray_process

    def start_ray_process(
        command: list[str], kind: str, *args: Any, **rest: Any
    ) -> Any:
        if kind == ray_constants.PROCESS_TYPE_RAYLET:
            agent = next(part for part in command if "--listen-port=" in part)
            port = agent.partition("--listen-port=")[2].split()[0]
            command = [*command, f"--dashboard_agent_listen_port={port}"]
        return start(command, kind, *args, **rest)

    services.start_ray_process = start_ray_process


if __name__ == "__main__":
    from ray.scripts.scripts import main

    wait_for_no_agent()
    main()
