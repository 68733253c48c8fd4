"""Compares what ranks say of themselves, and says in words why they do not go on.

Every rank of a group must call the same collectives in the same order with the same
sizes. PyTorch does not check this on its own: a rank waits, or aborts, or gets wrong
numbers. Calls are compared by group and number, and the first that differs is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from labkit.core.errors import WIDTH
from labkit.core.pulse import FINISHED, JOINING, Call, Pulse

# Kinds whose input has the same number of elements on every rank.
SAME_SIZE = frozenset(("all_reduce", "broadcast", "reduce", "all_gather"))
Pulses = dict[int, Pulse]


def disagreement(pulses: Pulses, *, harmful: bool = False) -> str | None:
    """The first collective that ranks called differently, None when none is known.

    Args:
        pulses: what each rank says.
        harmful: leave out other types of the same size: gloo then just moves bytes.
    """
    calls: dict[tuple[str, int], dict[int, Call]] = {}
    for rank, pulse in pulses.items():
        for call in pulse.calls:
            members = tuple(pulse.groups.get(call.group, ()))
            calls.setdefault((f"{call.group} {members}", call.number), {})[rank] = call
    differing = [
        (min(call.time_s for call in by_rank.values()), by_rank)
        for by_rank in calls.values()
        if len({signature(call, harmful) for call in by_rank.values()}) > 1
    ]
    if not differing:
        return None
    _, by_rank = min(differing, key=lambda found: found[0])
    told = "; ".join(
        f"{name_ranks(ranks)} {words}"
        for words, ranks in alike(
            {rank: describe(call, pulses[rank]) for rank, call in by_rank.items()}
        )
    )
    return (
        f"ranks called different collectives: {told}. Every rank of a group must make "
        "the same calls, in the same order and of the same size"
    )


def signature(call: Call, harmful: bool) -> tuple:
    """What must be equal on all ranks."""
    if call.kind not in SAME_SIZE:
        return (call.kind,)
    bits = re.sub(r"\D", "", call.dtype)
    return call.kind, tuple(call.elements), bits if harmful else call.dtype


def left_early(pulses: Pulses) -> str | None:
    """A rank that has finished while others wait for it, None when there is none."""
    for rank, call, absent in absences(pulses):
        gone = [
            other
            for other in absent
            if other in pulses and pulses[other].state == FINISHED
        ]
        if not gone:
            continue
        other = gone[0]
        mine, theirs = pulses[rank], pulses[other]
        sentence = (
            f"rank {other} finished after {count(theirs.last_number(call.group))}, "
            f"rank {rank} is waiting in its {ordinal(call.number)} "
            f"({describe(call, mine, number=False)})"
        )
        if theirs.num_logs and mine.num_logs:
            sentence += (
                f". Rank {other} made {theirs.num_logs} steps, rank {rank} is at step "
                f"{mine.num_logs + 1}: if rank {other} ran out of data, lengths must "
                f"match ({theirs.num_logs} vs {mine.num_logs + 1}); give each rank "
                "equally many batches, or train inside torch's Join"
            )
        return sentence
    return None


def absent_peer(pulses: Pulses) -> str | None:
    """A rank that does not come to the collective in which others wait."""
    for rank, call, absent in absences(pulses):
        if not absent:
            continue
        others = "; ".join(
            f"rank {other} {whereabouts(pulses.get(other))}" for other in absent
        )
        sentence = f"rank {rank} waits in {describe(call, pulses[rank])}, but {others}"
        if pulses[rank].purpose in ("state_dict", "full_tensor", "saving"):
            sentence += (
                ". This gathers parameters from all ranks: every rank must call it; "
                "one may then keep the result"
            )
        return sentence
    return None


def out_of_step(pulses: Pulses) -> bool:
    """Whether ranks of a group have called different numbers of collectives in it."""
    return any(
        len({pulses[rank].last_number(group) for rank in members if rank in pulses}) > 1
        for pulse in pulses.values()
        for group, members in pulse.groups.items()
    )


def not_joined(pulses: Pulses, num_ranks: int) -> str | None:
    """Ranks that have not joined the process group while others wait for them."""
    late = [
        rank
        for rank in range(num_ranks)
        if rank not in pulses or pulses[rank].state == JOINING
    ]
    missing = [rank for rank in late if rank not in pulses]
    if missing and len(late) > len(missing):
        waiting = name_ranks([rank for rank in late if rank in pulses])
        return f"{name_ranks(missing)} did not join; {waiting} waited at the rendezvous"
    return None


def absences(pulses: Pulses) -> Iterable[tuple[int, Call, list[int]]]:
    """Each rank that waits in a collective, and the ranks that have not come to it."""
    waits = [
        (call.time_s, rank, call)
        for rank, pulse in pulses.items()
        for call in pulse.calls
        if call.waiting
    ]
    for _, rank, call in sorted(waits, key=lambda wait: wait[:2]):
        members = pulses[rank].groups.get(call.group, list(pulses))
        yield (
            rank,
            call,
            [
                other
                for other in members
                if other not in pulses
                or pulses[other].last_number(call.group) < call.number
            ],
        )


def explain(pulses: Pulses) -> str | None:
    """Why ranks wait for each other, None when their calls do not show it."""
    return disagreement(pulses) or left_early(pulses) or absent_peer(pulses)


def table(pulses: Pulses, num_ranks: int, now_s: float) -> str:
    """A line per rank: its step, last collective and line of code."""
    header = ("rank", "step", "last collective", "now", "line")
    rows = [header]
    for rank in range(num_ranks):
        pulse = pulses.get(rank)
        if pulse is None:
            rows.append((str(rank), "-", "-", "not there yet", ""))
            continue
        call = last_call(pulse)
        rows.append(
            (
                str(rank),
                "-" if pulse.step is None else str(pulse.step),
                "-" if call is None else describe(call, pulse),
                doing(pulse, call, now_s),
                pulse.line,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(fit(row, widths) for row in rows)


def fit(row: tuple[str, ...], widths: list[int]) -> str:
    """A row of the table in one line; code that does not fit is cut off."""
    cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
    start = "  ".join(cells) + "  "
    place, colon, code = row[4].partition(": ")
    room = WIDTH - len(start + place + colon)
    if len(code) > room:
        code = code[: room - 1] + "\N{HORIZONTAL ELLIPSIS}" if room > 9 else ""
        colon = colon if code else ""
    return (start + place + colon + code).rstrip()


def last_call(pulse: Pulse) -> Call | None:
    """The oldest that it waits in, or else the last that it has made."""
    waiting = [call for call in pulse.calls if call.waiting]
    return waiting[0] if waiting else (pulse.calls[-1] if pulse.calls else None)


def doing(pulse: Pulse, call: Call | None, now_s: float) -> str:
    silence = now_s - pulse.time_s
    if pulse.state == FINISHED:
        return FINISHED
    if silence > 3:
        return f"silent for {silence:.0f} s"
    if call is not None and call.waiting:
        return f"waiting {now_s - call.time_s:.0f} s"
    return pulse.purpose or pulse.state


def whereabouts(pulse: Pulse | None) -> str:
    """What a rank does that is not where others wait for it."""
    if pulse is None:
        return "has not begun"
    for call in pulse.calls:
        if call.waiting:
            return f"waits in {describe(call, pulse)}"
    place = f" in {pulse.line}" if pulse.line else ""
    return f"has not come to it: it is {pulse.purpose or pulse.state}{place}"


def describe(call: Call, pulse: Pulse, *, number: bool = True) -> str:
    """`all_reduce #12 of 4 float32 (gradients)`."""
    text = call.kind + (f" #{call.number}" if number else "")
    if call.elements:
        text += f" of {sum(call.elements)} {call.dtype}".rstrip()
    if call.waiting and pulse.purpose:
        text += f" ({pulse.purpose})"
    return text


def alike(words: dict[int, str]) -> list[tuple[str, list[int]]]:
    """Ranks of which the same is told, together."""
    found: dict[str, list[int]] = {}
    for rank, text in sorted(words.items()):
        found.setdefault(text, []).append(rank)
    return list(found.items())


def name_ranks(ranks: list[int]) -> str:
    plural = "rank" if len(ranks) == 1 else "ranks"
    return f"{plural} {', '.join(map(str, ranks))}"


def count(number: int) -> str:
    return f"{number} collective" + ("" if number == 1 else "s")


def ordinal(number: int) -> str:
    ending = (
        "th"
        if 10 <= number % 100 <= 20
        else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"
