"""`headrace models set` and `headrace models decisions`: how a version is served and scaled, and why it is as it is."""

import re
import time
from typing import Annotated, Any

import typer

from headrace.globals import audited, with_bus
from shared.records import DAYS, EngineSettings, ScalingDecision, Version, VersionLimits

WINDOW = re.compile(r"(?:(?P<days>[a-z,-]+) )?(?P<from>\d\d:\d\d)-(?P<to>\d\d:\d\d)=(?P<min>\d+)")
Target = Annotated[str, typer.Argument(metavar="MODEL@VERSION")]


def set_(
    context: typer.Context,
    target: Target,
    min_replicas: Annotated[int | None, typer.Option(min=0, help="Workers that are always there.")] = None,
    max_replicas: Annotated[int | None, typer.Option(min=0, help="Workers at most.")] = None,
    idle_seconds: Annotated[float | None, typer.Option(min=0, help="Idle time until the last worker ends.")] = None,
    warm: Annotated[int | None, typer.Option(min=0, help="Loaded spares, which claim nothing until needed.")] = None,
    priority: Annotated[
        int | None, typer.Option(min=-100, max=100, help="Where devices are short, the higher goes first.")
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'[DAYS] HH:MM-HH:MM=MIN'",
            help="More workers at times, in UTC; all windows anew. E.g. 'mon-fri 08:00-18:00=4'.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An engine setting, e.g. slots=32.")
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Back to the default: a limit or an engine setting.")
    ] = None,
) -> None:
    """Change how a version is scaled and served, while it is. Its workers are replaced one at a time where need be."""
    from shared.config import set_config

    model, version = named(target)
    limits: dict[str, Any] = {
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "idle_seconds": idle_seconds,
        "warm": warm,
        "priority": priority,
        "schedule": [window(text) for text in schedule] if schedule else None,
    }
    limits = {name: value for name, value in limits.items() if value is not None}
    engine: dict[str, Any] = dict(pair(setting) for setting in set_ or [])
    for name in (each.removeprefix("--").replace("-", "_") for each in unset or []):
        names = VersionLimits.__struct_fields__ + EngineSettings.__struct_fields__
        if name not in names:
            raise typer.BadParameter(f"no setting {name!r}: there are {', '.join(names)}", param_hint="--unset")
        if name in limits or name in engine:
            raise typer.BadParameter(f"{name} is set too", param_hint="--unset")
        (limits if name in VersionLimits.__struct_fields__ else engine)[name] = None
    if not limits and not engine:
        raise typer.BadParameter("give something to change")
    detail = {"limits": limits, "engine": engine}
    record = audited(
        context, "version.change", target, lambda bus: set_config(bus, model, version, limits, engine), **detail
    )
    print("\n".join(config_lines(record)))


def decisions(context: typer.Context, target: Target) -> None:
    """The last decisions on how many workers a version has, with their reasons and what was seen; the newest last."""
    from controller.decisions import history
    from shared import registry
    from shared.errors import VersionNotFound

    model, version = named(target)

    async def read(bus: Any) -> list[ScalingDecision]:
        found = await history(bus, model, version)
        if not found and await registry.find_version(bus, model, version) is None:
            raise VersionNotFound(f"there is no {model}@{version}", param="version")
        return found

    found = with_bus(context, read)
    if not found:
        print(f"nothing was decided on {model}@{version} yet: it had no work, and no limit asks for a worker")
    spares = 0
    for decision in found:
        print(f"{utc(decision.at)} {decision_line(decision, spares)}")
        spares = decision.spares


def utc(at: float) -> str:
    """A time for people, as schedules have it: in UTC. `at` in unix seconds."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at))


def decision_line(decision: ScalingDecision, spares_before: int = 0) -> str:
    """One decision, for people: what changed, why, on what."""
    spares = f", spares {spares_before} -> {decision.spares}" if spares_before or decision.spares else ""
    signals = signals_line(decision)
    reasons = ", ".join(decision.reasons)
    return f"{decision.before} -> {decision.desired}{spares} ({reasons}){': ' if signals else ''}{signals}"


def signals_line(decision: ScalingDecision) -> str:
    """The signals that are known, as NAME=VALUE."""
    signals = decision.signals
    values = {name: getattr(signals, name) for name in signals.__struct_fields__}
    return " ".join(f"{name}={value:g}" for name, value in values.items() if value)


def config_lines(record: Version) -> list[str]:
    """What of a version can be changed, and is not at its default."""
    lines = []
    for name, settings in (("limits", record.limits), ("engine", record.engine)):
        default = type(settings)()
        shown = [
            f"{field}={_shown(value)}"
            for field in settings.__struct_fields__
            if (value := getattr(settings, field)) != getattr(default, field)
        ]
        lines.append(f"{record.model}@{record.version} {name}: {' '.join(shown) or 'as by default'}")
    return lines


def _shown(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return ";".join(f"{','.join(each.days)} {each.from_}-{each.to}={each.min_replicas}" for each in value)


def named(target: str) -> tuple[str, str]:
    """Model and version of MODEL@VERSION."""
    model, at, version = target.rpartition("@")
    if not (model and at and version):
        raise typer.BadParameter(f"{target!r} is not MODEL@VERSION")
    return model, version


def pair(setting: str, option: str = "--set") -> tuple[str, str]:
    """Name and value of NAME=VALUE."""
    name, equals, value = setting.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{setting!r} is not NAME=VALUE", param_hint=option)
    return name, value


def window(text: str) -> dict[str, Any]:
    """A window of a schedule, as the record has it, of `mon-fri,sun 08:00-18:00=4`; without days it is all of them."""
    found = WINDOW.fullmatch(text.strip().lower())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not like 'mon-fri 08:00-18:00=4'", param_hint="--schedule")
    days: list[str] = []
    for part in (found["days"] or "mon-sun").split(","):
        first, _, last = part.partition("-")
        if first not in DAYS or (last or first) not in DAYS:
            raise typer.BadParameter(f"{part!r} is no day of {', '.join(DAYS)}", param_hint="--schedule")
        begin = DAYS.index(first)
        count = (DAYS.index(last or first) - begin) % len(DAYS) + 1
        days += [DAYS[(begin + step) % len(DAYS)] for step in range(count)]
    return {"days": days, "from": found["from"], "to": found["to"], "min_replicas": int(found["min"])}
