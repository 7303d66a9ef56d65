"""From run folders to a decision: who may be compared, who is on the Pareto front, who is chosen, and why not the others.

Gate, memory, communication and step time stay separate columns; nothing is added up into a score (docs/decision.md).
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from distbench.config import Decide, Rule
from distbench.errors import ConfigError, RunFolderError
from distbench.runs.candidates import TIERS, Figure, Reading, Run, read_runs
from distbench.runs.folder import Status, now
from distbench.runs.noise import ASSUMED_BETWEEN, Ratio, StepTimes, digits
from distbench.runs.sides import settings
from distbench.runs.text import counted
from distbench.validation import validate_rule

SCHEMA = 1
"""Version of decision.json."""
MEMORY_NOISE = 0.01
"""Peaks closer than this, relatively, are the same: allocators round, and which block is reused is chance."""
WORTH_FINDING = 0.1
"""Where a sweep is too noisy to find differences this large, it says how many repeats would."""
SAME_ERROR = 1e-3
"""Precision errors closer than this, relatively, are the same."""
GIB = 2**30
MAX_DIFFERENCES = 4


@dataclass
class Candidate:
    """One effective experiment: its repeats' runs and their figures together."""

    runs: list[Run]
    tier: str
    """The weakest of its runs'."""
    parallel_error: Figure
    precision_error: Figure
    memory: Figure
    """The largest peak of its runs; `memory_low` the smallest."""
    memory_low: float | None
    exposed: Figure
    tokens: Figure
    notes: list[str] = field(default_factory=list)
    step_time: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    """Median, low, high in s."""
    pareto: bool | None = None
    """None: without a memory figure it cannot be said."""
    chosen: bool = False
    versus: Ratio | None = None
    """Step time against the choice."""
    reason: str = ""
    """Why it is, or is not, the choice."""

    @property
    def name(self) -> str:
        """Its folder's name, without which repeat it is."""
        return re.sub(r"[,_]repeat=\d+$", "", self.runs[0].name)

    @property
    def labels(self) -> dict[str, str]:
        return self.runs[0].labels


@dataclass(frozen=True)
class Group:
    """Runs that may be compared with each other."""

    number: int
    """From 1, the one with most runs that can be ranked first."""
    key: str
    num_runs: int
    num_rankable: int
    shared: dict[str, Any]
    differs: tuple[str, ...] = ()
    """From the ranked group, setting by setting."""
    why_none: str = ""
    """Why none of its runs can be ranked, where that is so."""


@dataclass
class Ranking:
    """A decision and everything it rests on."""

    decide: Decide
    reading: Reading
    groups: list[Group]
    group: Group | None
    """The ranked one."""
    candidates: list[Candidate]
    """The choice first, then by step time."""
    unranked: list[Run]
    """Of the ranked group, each with `excluded`."""
    chosen: Candidate | None
    why: str
    """Why this choice, or why there is none."""
    notes: list[str] = field(default_factory=list)
    times: StepTimes | None = None
    """In an order of its own: for the noise only."""


def rank(paths: Iterable[str | Path], decide: Decide | None = None, group: int | None = None) -> Ranking:
    """Read the runs at or below `paths` and decide.

    Without `decide`, the rule that the runs were started with, where they agree, else the fastest. Raises
    RunFolderError for a path that is not there and a group that does not exist.
    """
    reading = read_runs(paths)
    groups = _groups(reading, group)
    if not groups:
        return Ranking(
            decide or Decide(), reading, [], None, [], [], None, "there is no readable record", _places(reading)
        )
    chosen_group = groups[(group or 1) - 1]
    runs = [run for run in reading.runs if run.group == chosen_group.key]
    own, ruled = _own_rule(runs)
    runs = _of_one_meter(_without_failed_repeats(runs))
    notes = [*_places(reading), *(ruled if decide is None else [])]
    decide = decide or own
    unranked = [run for run in runs if run.excluded]
    candidates = _candidates(run for run in runs if not run.excluded)
    _note_other_repeats(candidates, unranked)
    ranking = Ranking(decide, reading, groups, chosen_group, candidates, unranked, None, "", notes)
    if not candidates:
        ranking.why = _why_none(unranked)
        return ranking
    ranking.times = StepTimes.of(
        [[run.windows for run in candidate.runs] for candidate in candidates],
        [[run.block for run in candidate.runs] for candidate in candidates],
    )
    _Decision(ranking, ranking.times).make()
    return ranking


def _own_rule(runs: Sequence[Run]) -> tuple[Decide, list[str]]:
    """The rule that these runs were started with, or the fastest, and why."""
    own = {run.decide for run in runs if run.decide}
    if not own:
        return Decide(), []
    if len(own) > 1:
        return Decide(), ["the runs were started with different rules: the fastest is looked for; --rule says another"]
    try:
        tree = json.loads(own.pop())
        rule, within = Rule[tree["rule"]], float(tree["within_percent"])
        memory = None if tree.get("memory_gib") is None else float(tree["memory_gib"])
    except (KeyError, TypeError, ValueError):
        return Decide(), ["the rule in the records cannot be read: the fastest is looked for"]
    decide = Decide(rule, memory, within)
    try:
        validate_rule(decide)
    except ConfigError:
        return Decide(), ["the rule in the records makes no sense: the fastest is looked for"]
    return decide, []


def _places(reading: Reading) -> list[str]:
    """What was found and not read."""
    found = []
    if reading.copies:
        found.append(f"{counted(reading.copies, 'run folder')} left out: copies of runs that are there already")
    if reading.links:
        found.append(f"{counted(reading.links, 'link')} to folders not followed: name them, to have them read")
    return found


def _of_one_meter(runs: list[Run]) -> list[Run]:
    """Step times of different meters are not compared: that of our own runs counts, without any the one that most have."""
    there = [run for run in runs if not run.excluded]
    meters = Counter(str(run.step_time.meter) for run in there)
    if len(meters) < 2:
        return runs
    own = Counter(str(run.step_time.meter) for run in there if not run.labels["from"]) or meters
    kept = max(own, key=lambda meter: (own[meter], meter))
    return [
        run
        if run.excluded or str(run.step_time.meter) == kept
        else replace(run, excluded=f"step time measured by {run.step_time.meter}, the others' by {kept}: not compared")
        for run in runs
    ]


def _groups(reading: Reading, wanted: int | None) -> list[Group]:
    """Largest first; `differs` is against the one that is ranked."""
    runs = Counter(run.group for run in reading.runs)
    rankable = Counter(run.group for run in reading.runs if not run.excluded)
    keys = sorted(runs, key=lambda key: (-rankable[key], -runs[key], key))  # whatever order they were found in
    if wanted is not None and not 1 <= wanted <= max(1, len(keys)):
        raise RunFolderError(f"there is no group {wanted}; there are {len(keys)}")
    if not keys:
        return []
    reference = reading.shared[keys[(wanted or 1) - 1]]
    excluded = defaultdict(list)
    for run in reading.runs:
        excluded[run.group].append(run)
    return [
        Group(
            n,
            key,
            runs[key],
            rankable[key],
            reading.shared[key],
            tuple(_differences(reading.shared[key], reference)),
            "" if rankable[key] else _why_none(excluded[key]),
        )
        for n, key in enumerate(keys, 1)
    ]


def _differences(shared: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    if shared == reference:
        return []
    here, there = (settings(tree, Path("record.json")) for tree in (shared, reference))
    names = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    found = [f"{name} {_value(here.get(name))} instead of {_value(there.get(name))}" for name in names]
    rest = len(found) - MAX_DIFFERENCES
    return found[:MAX_DIFFERENCES] + ([f"{rest} more"] if rest > 0 else [])


def _value(value: Any) -> str:
    return "none" if value is None else str(value)[:60]


def _without_failed_repeats(runs: list[Run]) -> list[Run]:
    """What failed its gate once does not count as passed for having passed it another time."""
    failed = {run.effective for run in runs if run.status == Status.gate_failed.value}
    return [
        replace(run, excluded="a repeat of it failed its gate") if not run.excluded and run.effective in failed else run
        for run in runs
    ]


def _note_other_repeats(candidates: list[Candidate], unranked: list[Run]) -> None:
    """A candidate is told with those of its repeats that it is not ranked by."""
    others = defaultdict(list)
    for run in unranked:
        others[run.effective].append(run)
    for candidate in candidates:
        if failed := others[candidate.runs[0].effective]:
            count, total = len(failed), len(failed) + len(candidate.runs)
            candidate.notes.append(f"{count} of its {total} repeats cannot be ranked: {failed[0].excluded}")


def _candidates(runs: Iterable[Run]) -> list[Candidate]:
    merged: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        merged[run.effective].append(run)
    found = [_candidate(sorted(same, key=lambda run: (run.name, str(run.path)))) for same in merged.values()]
    return sorted(found, key=lambda candidate: (candidate.name, str(candidate.runs[0].path)))


def _candidate(runs: list[Run]) -> Candidate:
    tier = max((run.tier for run in runs if run.tier), key=TIERS.index)
    memory = _together([run.memory for run in runs], max)
    return Candidate(
        runs=runs,
        tier=tier,
        parallel_error=_together([run.parallel_error for run in runs], max),
        precision_error=_together([run.precision_error for run in runs], max),
        memory=memory,
        memory_low=None if memory.value is None else min(r.memory.value for r in runs if r.memory.value is not None),
        exposed=_together([run.exposed for run in runs], statistics.median),
        tokens=_together([run.tokens for run in runs], statistics.geometric_mean),  # as step times are
        notes=[note for run in runs for note in run.notes],
    )


def _together(figures: list[Figure], how: Callable[[list[float]], float]) -> Figure:
    """One figure of all repeats, by one meter."""
    there = [figure for figure in figures if figure.value is not None]
    if not there:
        return figures[0]
    meters = {figure.meter for figure in there}
    if len(meters) > 1:
        return Figure(None, None, f"repeats were measured by different meters: {', '.join(sorted(map(str, meters)))}")
    return Figure(how([figure.value for figure in there if figure.value is not None]), there[0].meter)


def _why_none(unranked: list[Run]) -> str:
    reasons = Counter(run.excluded for run in unranked)
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
    return f"no run can be ranked: {listed}{'; ...' if len(reasons) > 3 else ''}"


class _Decision:
    """Fills in a ranking: the front, the choice, and a reason for everyone."""

    def __init__(self, ranking: Ranking, times: StepTimes) -> None:
        self.ranking, self.times, self.rule = ranking, times, ranking.decide
        self.candidates = ranking.candidates
        self.meter = self._memory_meter()

    def make(self) -> None:
        self._figures()
        self._front()
        fastest = int(np.argmin(self.times.log_medians))
        refusals = [self._refusal(index, fastest) for index in range(len(self.candidates))]
        eligible = [index for index, refusal in enumerate(refusals) if refusal is None]
        self._notes()
        if not eligible:
            for candidate, refusal in zip(self.candidates, refusals, strict=True):
                candidate.reason = refusal or ""
            others = "; why each of the others does not is said beside it" if len(refusals) > 1 else ""
            self.ranking.why = (
                f"no candidate satisfies decide={self.rule.rule.name}: the fastest, {self.candidates[fastest].name}, "
                f"{refusals[fastest]}{others}"
            )
            self._sort()
            return
        choice = self._choose(eligible)
        for index, candidate in enumerate(self.candidates):
            candidate.versus = self.times.ratio(index, choice)
            candidate.reason = refusals[index] or self._reason(index, choice)
        chosen = self.candidates[choice]
        chosen.chosen = True
        ties = [c for i, c in enumerate(self.candidates) if i != choice and i in eligible and self._ties(i, choice)]
        chosen.reason = self.ranking.why = self._why(len(eligible), ties)
        self.ranking.chosen = chosen
        self._sort()

    def _figures(self) -> None:
        for index, candidate in enumerate(self.candidates):
            candidate.step_time = self.times.median(index)

    def _memory_meter(self) -> str | None:
        meters = Counter(c.memory.meter for c in self.candidates if c.memory.value is not None)
        return max(meters, key=lambda meter: (meters[meter], str(meter))) if meters else None  # in any order of folders

    def _memory(self, candidate: Candidate) -> Figure:
        """Its peak, if it was measured as the others'."""
        figure = candidate.memory
        if figure.value is not None and figure.meter != self.meter:
            return Figure(None, figure.meter, f"measured by {figure.meter}, the others by {self.meter}")
        return figure

    def _front(self) -> None:
        """Dominated: someone is better beyond noise in time or memory and not worse beyond noise in the other."""
        known = [i for i, candidate in enumerate(self.candidates) if self._memory(candidate).value is not None]
        if not known:
            return
        logs, squares = self.times.log_medians[known], np.square(self.times.contrasts[known])
        high = np.array([self.candidates[i].memory.value for i in known], dtype=np.float64)
        low = np.array([self.candidates[i].memory_low for i in known], dtype=np.float64)
        quantile = self.times.quantile
        for place, index in enumerate(known):
            reach = quantile * np.sqrt(squares + squares[place])
            longer = logs[place] - logs
            more = low[place] > high * (1 + MEMORY_NOISE)
            less = high[place] * (1 + MEMORY_NOISE) < low
            dominated = ((longer > reach) & ~less) | (more & ~(longer < -reach))
            self.candidates[index].pareto = not bool(dominated.any())

    def _refusal(self, index: int, fastest: int) -> str | None:
        """Why the rule does not allow this candidate at all."""
        rule, candidate = self.rule, self.candidates[index]
        memory = self._memory(candidate)
        if rule.rule in (Rule.fastest_within_memory, Rule.smallest_within) and memory.value is None:
            return f"no peak memory to judge it by: {memory.reason}"
        if rule.rule is Rule.fastest_within_memory:
            assert memory.value is not None and rule.memory_gib is not None
            if memory.value > rule.memory_gib * GIB:
                needed = _beyond(memory.value / GIB, rule.memory_gib)
                return f"needs {needed} GiB, more than the {rule.memory_gib:g} GiB there are"
        if rule.rule is Rule.most_accurate_within and candidate.precision_error.value is None:
            return f"no precision error to judge it by: {candidate.precision_error.reason}"
        if rule.rule in (Rule.smallest_within, Rule.most_accurate_within):
            ratio = self.times.ratio(index, fastest)
            if ratio.value > 1 + rule.within_percent / 100:
                beyond = "" if ratio.verdict == "slower" else ", though not for sure"
                percent = digits(100 * (ratio.value - 1))
                return f"{percent} % slower than the fastest, more than {rule.within_percent:g} %{beyond}"
        return None

    def _choose(self, eligible: list[int]) -> int:
        """The rule's best; of those as good within the noise, one that is on the front, then the fastest. Where time
        decides, none whose median is more than WORTH_FINDING longer: what noise hides is no reason to take it."""
        best = min(eligible, key=lambda index: (self._merit(index), self.times.log_medians[index]))
        as_good = [index for index in eligible if index == best or self._ties(index, best)]
        if self.rule.rule in (Rule.fastest, Rule.fastest_within_memory):
            limit = self.times.log_medians[best] + math.log1p(WORTH_FINDING)
            as_good = [index for index in as_good if self.times.log_medians[index] <= limit]
        on_front = [index for index in as_good if self.candidates[index].pareto]
        return min(on_front or [best], key=lambda index: self.times.log_medians[index])

    def _merit(self, index: int) -> float:
        candidate = self.candidates[index]
        if self.rule.rule is Rule.smallest_within:
            return candidate.memory.value or 0.0
        if self.rule.rule is Rule.most_accurate_within:
            return candidate.precision_error.value or 0.0
        return float(self.times.log_medians[index])

    def _ties(self, index: int, other: int) -> bool:
        """Whether the rule's own criterion cannot tell the two apart."""
        a, b = self.candidates[index], self.candidates[other]
        if self.rule.rule is Rule.smallest_within:
            return not _less(a, b) and not _less(b, a)
        if self.rule.rule is Rule.most_accurate_within:
            return math.isclose(a.precision_error.value or 0.0, b.precision_error.value or 0.0, rel_tol=SAME_ERROR)
        return self.times.ratio(index, other).verdict == "no difference"

    def _reason(self, index: int, choice: int) -> str:
        """In one line, what is known of an eligible loser against the choice."""
        candidate, chosen = self.candidates[index], self.candidates[choice]
        versus = candidate.versus
        assert versus is not None
        parts = [str(versus), self._memory_reason(candidate, chosen)]
        if self.rule.rule is Rule.most_accurate_within:
            parts.insert(0, f"precision error {_error(candidate)} against {_error(chosen)}")
        if index != choice and self._ties(index, choice) and versus.verdict == "no difference":
            if versus.value >= 1:
                parts.append("the choice is listed first for its lower median")
            elif _less(chosen, candidate):
                parts.append("the choice is listed first for its less memory")
        return "; ".join(parts)

    def _memory_reason(self, candidate: Candidate, chosen: Candidate) -> str:
        for figure in (self._memory(candidate), self._memory(chosen)):
            if figure.value is None:
                return f"memory not compared: {figure.reason}"
        if not _less(candidate, chosen) and not _less(chosen, candidate):
            return "the same memory"
        assert candidate.memory.value is not None and chosen.memory.value is not None
        change = candidate.memory.value / chosen.memory.value - 1
        return f"{digits(abs(100 * change))} % {'more' if change > 0 else 'less'} memory"

    def _why(self, num_eligible: int, ties: list[Candidate]) -> str:
        rule = self.rule
        what = {
            Rule.fastest: "fastest",
            Rule.fastest_within_memory: f"fastest within {rule.memory_gib:g} GiB" if rule.memory_gib else "",
            Rule.smallest_within: f"least memory within {rule.within_percent:g} % of the fastest",
            Rule.most_accurate_within: f"least precision error within {rule.within_percent:g} % of the fastest",
        }[rule.rule]
        if len(self.candidates) == 1:
            return "the only candidate: there is nothing to compare it with"
        if num_eligible == 1:
            return f"{what}: the only one of {len(self.candidates)} that qualifies"
        if ties:
            names = ", ".join(tie.name for tie in ties[:3]) + (f" and {len(ties) - 3} more" if len(ties) > 3 else "")
            if self.rule.rule in (Rule.fastest, Rule.fastest_within_memory) and self._slower_median(ties):
                return f"{what} of {num_eligible} within the noise, for its less memory; not told apart in time from {names}"
            return f"{what} of {num_eligible}, but no difference beyond noise to {names}{self._unsure_within()}"
        within = rule.rule in (Rule.smallest_within, Rule.most_accurate_within)
        sure = f"beyond the {100 * ASSUMED_BETWEEN:g} % assumed" if self.times.assumed else "beyond noise"
        return f"{what} of {num_eligible}{self._unsure_within() if within else f', {sure}'}"

    def _slower_median(self, ties: list[Candidate]) -> bool:
        """Whether someone that is as good within the noise has a lower median than the choice."""
        choice = next(candidate for candidate in self.candidates if candidate.chosen)
        return any(tie.step_time[0] < choice.step_time[0] for tie in ties)

    def _unsure_within(self) -> str:
        """How much slower the choice may be, where the noise does not place it within the rule's percentage for sure."""
        if self.rule.rule not in (Rule.smallest_within, Rule.most_accurate_within):
            return ""
        choice = next(index for index, candidate in enumerate(self.candidates) if candidate.chosen)
        ratio = self.times.ratio(choice, int(np.argmin(self.times.log_medians)))
        if ratio.high <= 1 + self.rule.within_percent / 100:
            return ""
        return f", by the medians: it may be up to {100 * (ratio.high - 1):.3g} % slower"

    def _notes(self) -> None:
        times, notes = self.times, self.ranking.notes
        if times.assumed:
            rerun = any(run.repeat > 1 for run in self.ranking.unranked)
            which = "of repeated runs one alone can be ranked" if rerun else "no run was repeated"
            notes.append(
                f"{which}, so {100 * ASSUMED_BETWEEN:g} % from run to run is assumed, not measured: "
                "sweep.repeats=3 measures it"
            )
        else:
            repeats = sum(len(c.runs) for c in self.candidates)
            notes.append(
                f"step times vary by {digits(100 * times.between)} % from run to run (standard deviation, {repeats} runs of "
                f"{counted(len(self.candidates), 'candidate')})"
                + (
                    f"; within a repeat, where they are compared, by {digits(100 * times.blocks.within)} %"
                    if times.blocks
                    else ""
                )
            )
        if len(self.candidates) > 1 and not times.assumed:
            notes.append(self._resolution())
        if times.blocks is None and not times.assumed and (odd := self._not_in_every_repeat()):
            notes.append(f"not compared repeat by repeat: {odd} was not run once in every repeat that another was")
        others = Counter(
            str(c.memory.meter) for c in self.candidates if c.memory.value is not None and c.memory.meter != self.meter
        )
        notes.extend(
            f"memory measured by {meter} ({count}) is not compared with {self.meter}" for meter, count in others.items()
        )

    def _not_in_every_repeat(self) -> str | None:
        """The candidate for whose sake others, run in turn, are compared as if they had not been."""
        own = {c.name: sorted(str(run.block) for run in c.runs if run.block is not None) for c in self.candidates}
        most = max(own.values(), key=lambda blocks: (len(blocks), blocks))
        return next((name for name, blocks in own.items() if blocks != most), None) if len(most) > 1 else None

    def _resolution(self) -> str:
        """What the sweep could have found, so that "no difference" is not read as "none there is"."""
        smallest = self.times.resolution - 1
        fastest = int(np.argmin(self.times.log_medians))
        ratios = [self.times.ratio(index, fastest) for index in range(len(self.candidates))]
        seen = max((ratio.value for ratio in ratios if ratio.verdict == "no difference"), default=1.0)
        found = f"with that noise, a difference of {digits(100 * smallest)} % or more is found four times in five"
        if smallest <= WORTH_FINDING:
            return found
        target = max(seen, 1 + WORTH_FINDING)  # what was seen and is not told apart, where that is more
        needed = self.times.repeats_to_find(target)
        worth = f"{digits(100 * (target - 1))} %" + (
            ", the largest that was seen" if target > 1 + WORTH_FINDING else ""
        )
        return f"{found}; for {worth}, " + (
            f"about sweep.repeats={needed}" if needed else "longer windows or a quieter machine"
        )

    def _sort(self) -> None:
        self.candidates.sort(key=lambda candidate: (not candidate.chosen, candidate.step_time[0]))


def _less(a: Candidate, b: Candidate) -> bool:
    """Whether a's peak is below b's beyond noise."""
    if a.memory.value is None or b.memory_low is None:
        return False
    return a.memory.value * (1 + MEMORY_NOISE) < b.memory_low


def _error(candidate: Candidate) -> str:
    return "none" if candidate.precision_error.value is None else f"{candidate.precision_error.value:.1e}"


def _beyond(value: float, limit: float) -> str:
    """A value above its limit, with as many digits as it takes to see that."""
    return next(text for digits in (3, 6, 9, 17) if float(text := f"{value:.{digits}g}") > limit or digits == 17)


# --- decision.json


def to_json(ranking: Ranking, root: Path | None = None) -> dict[str, Any]:
    """The tree of decision.json; paths are relative to `root` where they are below it."""

    def path(of: Path) -> str:
        return str(of.relative_to(root)) if root is not None and of.is_relative_to(root) else str(of)

    def figure(of: Figure) -> dict[str, Any]:
        return {"value": of.value, "meter": of.meter, "reason": of.reason}

    def candidate(c: Candidate) -> dict[str, Any]:
        median, low, high = c.step_time
        return {
            "name": c.name,
            "runs": [path(run.path) for run in c.runs],
            **c.labels,
            "gate_tier": c.tier,
            "parallel_error": figure(c.parallel_error),
            "precision_error": figure(c.precision_error),
            "peak_memory": {**figure(c.memory), "unit": "bytes", "low": c.memory_low},
            "exposed_comm": {**figure(c.exposed), "unit": "s"},
            "step_time": {
                "median": median,
                "low": low,
                "high": high,
                "unit": "s",
                "meter": c.runs[0].step_time.meter,
                "reason": None,
            },
            "tokens_per_second": figure(c.tokens),
            "pareto": c.pareto,
            "chosen": c.chosen,
            "versus_choice": None if c.versus is None else {**vars(c.versus), "verdict": c.versus.verdict},
            "reason": c.reason,
            "notes": c.notes,
        }

    times = ranking.times
    return {
        "schema": SCHEMA,
        "made": now(),
        "decide": {**asdict(ranking.decide), "rule": ranking.decide.rule.name},
        "chosen": ranking.chosen.name if ranking.chosen else None,
        "chosen_runs": [path(run.path) for run in ranking.chosen.runs] if ranking.chosen else [],
        "why": ranking.why,
        "notes": ranking.notes,
        "noise": None
        if times is None
        else {
            "between_runs": times.between,
            "assumed": times.assumed,
            "within_repeats": None if times.blocks is None else times.blocks.within,
            "degrees_of_freedom": None if times.assumed else times.contrast_degrees,
            "resolution": None if times.assumed else times.resolution,
            "memory": MEMORY_NOISE,
        },
        "group": None
        if ranking.group is None
        else {"number": ranking.group.number, "runs": ranking.group.num_runs, "shared": ranking.group.shared},
        "other_groups": [
            {"number": g.number, "runs": g.num_runs, "differs": list(g.differs), "why_none": g.why_none or None}
            for g in ranking.groups
            if ranking.group is not None and g.number != ranking.group.number
        ],
        "candidates": [candidate(c) for c in ranking.candidates],
        "unranked": [
            {"name": run.name, "path": path(run.path), "status": run.status, **run.labels, "reason": run.excluded}
            for run in ranking.unranked
        ],
        "unreadable": [{"path": path(where), "reason": why} for where, why in ranking.reading.unreadable],
        "refused_cells": [path(where) for where in ranking.reading.refused],
        "duplicate_cells": ranking.reading.duplicates,
    }
