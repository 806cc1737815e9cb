"""``kerf completion SHELL``: what a shell must read so that it completes commands, options and fields."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["VARIABLE", "completion"]

VARIABLE = "_KERF_COMPLETE"
"""Set by the shell when it asks for completions; click derives the name from that of the program."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash: eval "$(kerf completion bash)"     in ~/.bashrc
    zsh:  eval "$(kerf completion zsh)"      in ~/.zshrc
    fish: kerf completion fish | source      in ~/.config/fish/config.fish
    """
    from kerf_runtime.cli.root import cli

    kind = get_completion_class(shell)
    assert kind is not None  # click knows the three
    click.echo(kind(cli, {}, "kerf", VARIABLE).source())
