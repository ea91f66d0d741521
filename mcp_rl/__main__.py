"""`python -m mcp_rl` is the `mcp-rl` command."""

from mcp_rl.cli import main

if __name__ == "__main__":
    main()
