"""What became of a run: outcomes, pauses by the fault that caused them, and what must not be."""

from collections import Counter

import msgspec

from faults.fleet import Held
from faults.load import Pause, Record
from faults.schedule import Done

SLACK_S = 0.3  # a pause may begin a little before its fault: the last tokens were on their way
AFTERMATH_S = 8.0  # an election, the expiry of an ack
OTHER = "no fault"

SPARE_MAX = 4.0  # tokens a cancel: what is on its way to the client, and one step of up to two choices


class Report(msgspec.Struct, kw_only=True):
    """One scenario's account. `problems` empty: everything is as promised."""

    scenario: str
    seed: int
    seconds: float = 0.0
    faults: dict[str, int] = {}
    requests: int = 0
    tokens: int = 0
    outcomes: dict[str, int] = {}
    pauses: dict[str, list[float]] = {}  # seconds, by kind of fault
    waits: dict[str, list[float]] = {}  # the same for first tokens
    read_all: bool = False  # every answer was streamed, so that `tokens` are all that clients got
    moved: int = 0  # requests that more than one claim served
    problems: list[str] = []
    notes: list[str] = []

    def lines(self) -> list[str]:
        """The report as text."""
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())) or "none"
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        lines = [
            f"== {self.scenario} (seed {self.seed}): {self.seconds:.0f} s, faults: {faults}",
            f"   {self.requests} requests, {self.tokens} tokens: {outcomes}; {self.moved} were moved",
        ]
        for title, found in (("pauses", self.pauses), ("waits for a first token", self.waits)):
            for kind, seconds in sorted(found.items()):
                lines.append(f"   {title}, {kind}: {distribution(seconds)}")
        lines += [f"   {note}" for note in self.notes]
        lines += [f"   PROBLEM: {problem}" for problem in self.problems]
        return lines


def distribution(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
    return f"{len(ordered)}, p50 {p50:.2f} s, p99 {p99:.2f} s, max {ordered[-1]:.2f} s"


def attribute(records: list[Record], done: list[Done]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Pauses, and waits for first tokens, by the kind of the fault that began them."""
    pauses: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    for record in records:
        for pause in record.pauses:
            found = waits if pause.first else pauses
            found.setdefault(_cause(pause, done), []).append(pause.end - pause.begin)
    return pauses, waits


def _cause(pause: Pause, done: list[Done]) -> str:
    """The first fault after the last token, else the latest one whose consequences may have lasted until then."""
    began = [fault for fault in done if pause.begin - SLACK_S <= fault.begin <= pause.end]
    if began:
        return began[0].kind
    lasting = [fault for fault in done if fault.begin <= pause.begin <= fault.end + AFTERMATH_S]
    return max(lasting, key=lambda fault: fault.begin).kind if lasting else OTHER


def account(
    report: Report, records: list[Record], done: list[Done], held: Held, allowed: set[str], dead_letters: int
) -> None:
    """Fill a report. `allowed` outcomes besides completed and cancelled are counted and no problem."""
    report.requests, report.tokens = len(records), sum(record.tokens for record in records)
    report.outcomes = dict(Counter(record.outcome for record in records))
    report.faults = dict(Counter(fault.kind for fault in done))
    report.moved = sum(record.claims > 1 for record in records)
    report.pauses, report.waits = attribute(records, done)
    for record in records:
        if record.outcome not in {"completed", "cancelled"} | allowed:
            report.problems.append(
                f"{record.kind} {record.rid or '(no id)'} at {record.end:.2f}: {record.outcome} {record.detail}"
            )
    repeated = [rid for rid, count in Counter(record.rid for record in records if record.rid).items() if count > 1]
    if repeated:
        report.problems.append(f"ids that stand for several requests: {repeated[:5]}")
    if held.total:
        report.problems.append(f"still held at the end: {held}")
    if dead_letters:
        report.problems.append(f"{dead_letters} requests are in the DLQ")


def check_books(report: Report, ingresses: list[dict[str, float]], workers: list[dict[str, float]]) -> str:
    """Compare the counters of ingresses and workers that have all lived; what they say."""

    def total(pages: list[dict[str, float]], name: str, outcome: str = "") -> int:
        wanted = f'outcome="{outcome}"' if outcome else ""
        return int(
            sum(
                value
                for page in pages
                for sample, value in page.items()
                if sample.partition("{")[0] == name and wanted in sample
            )
        )

    published, withdrawn = total(ingresses, "headrace_published_total"), total(ingresses, "headrace_withdrawn_total")
    ended = {each: total(ingresses, "headrace_ended_total", each) for each in ("completed", "failed", "cancelled")}
    claims = {each: total(workers, "headrace_claims_ended_total", each) for each in (*ended, "moved")}
    served = sum(claims.values()) - claims["moved"]
    if published != sum(ended.values()) or not published:
        report.problems.append(f"published {published}, but ended {ended}")
    # a message that is withdrawn while it is on its way to a worker is counted by both
    if not published - withdrawn <= served <= published or claims["failed"] != ended["failed"] or claims["moved"]:
        report.problems.append(f"ingresses: {published} published, {withdrawn} withdrawn; workers: {claims}")
    # a client can leave while the last frame is on its way to its ingress
    if claims["completed"] < ended["completed"]:
        report.problems.append(f"ingresses completed {ended['completed']}, workers {claims['completed']}")
    left = report.outcomes.get("cancelled", 0)
    if left and report.read_all:
        spare = (total(workers, "vllm:generation_tokens_total") - report.tokens) / left
        report.notes.append(f"{spare:.1f} tokens a cancel were generated and not read")
        if spare > SPARE_MAX:
            report.problems.append(f"work went on after cancels: {spare:.1f} tokens each")
    return f"books: {published} published = {ended}, {withdrawn} withdrawn; workers: {claims}"
