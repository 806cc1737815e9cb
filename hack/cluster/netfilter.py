"""Removing the node's netfilter chains, and only those.

The kubelet, kube-proxy and two CNI plugins make chains named ``KUBE-*`` and ``CNI-*`` and rules in
the built-in chains that jump to them.  Docker and others keep chains in the same tables, so tables
are never flushed or rewritten: what is removed are rules that jump to a chain of ours, and chains
of ours, in one transaction per table.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable

from hack.cluster.host import run

__all__ = ["chains", "removal", "remove_new_chains"]

PREFIXES = ("KUBE-", "CNI-")
TABLES = ("filter", "nat", "mangle")
PROGRAMS = ("iptables", "ip6tables")


def chains() -> dict[str, list[str]]:
    """Chains with our prefixes that exist now, by ``program/table``."""
    return {
        f"{program}/{table}": _chains_of(_saved(program, table))
        for program in PROGRAMS
        if shutil.which(program)
        for table in TABLES
    }


def remove_new_chains(before: dict[str, list[str]]) -> int:
    """Remove the chains that did not exist ``before``; returns how many."""
    removed = 0
    for key, existing in chains().items():
        program, table = key.split("/")
        ours = [name for name in existing if name not in before.get(key, [])]
        if not ours:
            continue
        script = removal(table, _saved(program, table), ours)
        run(f"{program}-restore", "--noflush", stdin=script)
        removed += len(ours)
    return removed


def removal(table: str, saved: str, ours: Iterable[str]) -> str:
    """The input for ``iptables-restore --noflush`` that removes chains and the rules to them.

    Args:
        saved: the output of ``iptables-save -t TABLE``.
        ours: names of the chains to remove.
    """
    mine = set(ours)
    lines = [f"*{table}"]
    for line in saved.splitlines():
        if not line.startswith("-A "):
            continue
        words = shlex.split(line)
        chain = words[1]
        target = next((words[i + 1] for i, w in enumerate(words) if w in ("-j", "-g")), None)
        if chain not in mine and target in mine:
            lines.append(f"-D {line.removeprefix('-A ')}")
    # Every chain is emptied before the first is deleted: they refer to each other.
    lines += [f"-F {name}" for name in sorted(mine)]
    lines += [f"-X {name}" for name in sorted(mine)]
    return "\n".join([*lines, "COMMIT", ""])


def _saved(program: str, table: str) -> str:
    return run(f"{program}-save", "-t", table)


def _chains_of(saved: str) -> list[str]:
    names = (line[1:].split()[0] for line in saved.splitlines() if line.startswith(":"))
    return [name for name in names if name.startswith(PREFIXES)]
