"""The part of a report about rounds, and about workers that train alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from topotrain.core.events import Rounds, StateTaken
from topotrain.tools.monitor.progress.process_tally import ProcessTally


def round_report(
    rounds: Rounds | None, taken: Sequence[StateTaken], tallies: Mapping[str, ProcessTally]
) -> dict[str, Any] | None:
    """Return the figures of rounds and workers; None: there is no outer optimizer.

    rounds: the last event about them. taken: all states that were taken from another group, or were not.
    """
    alone = {who: tallies[who].whole for who in sorted(tallies) if tallies[who].trains_alone}
    if rounds is None and not alone:
        return None
    return {
        **_of_rounds(rounds),
        "lost_steps": sum(counts.lost for counts in alone.values()),
        "states_taken": sum(each.whole for each in taken),
        "states_missed": sum(not each.whole for each in taken),
        "workers": [
            {
                "who": who,
                "steps": counts.made,
                "lost_steps": counts.lost,
                "waited_s": counts.waited_s,
                "bytes_out": counts.bytes_out,
                "bytes_in": counts.bytes_in,
            }
            for who, counts in alone.items()
        ],
    }


def _of_rounds(found: Rounds | None) -> dict[str, Any]:
    if found is None:  # the job failed before its first round was reported
        found = Rounds("", {}, 0.0, 0, ())
    members = {int(count): rounds for count, rounds in found.members.items()}
    rounds = sum(members.values())
    return {
        "count": rounds,
        "members": {str(count): members[count] for count in sorted(members)},
        "members_mean": sum(count * made for count, made in members.items()) / rounds if rounds else None,
        "age_mean": found.age_mean,
        "age_max": found.age_max,
        "last": [_round(line) for line in found.last],
    }


def _round(line: str) -> dict[str, Any]:
    fragment, number, *groups = map(int, line.split())
    return {"fragment": fragment, "number": number, "groups": groups}
