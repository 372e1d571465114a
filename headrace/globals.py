"""The options that every command knows: which stack it is about."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import typer

from headrace.stack import state
from headrace.stack.state import StackError
from shared import settings as settings_module
from shared.settings import Settings, SettingsError

if TYPE_CHECKING:
    from shared.audit import Action

T = TypeVar("T")

API_KEY = "HEADRACE_API_KEY"
KEY_OPTION = "--key"
GLOBAL_OPTIONS = ("--data", "--url", KEY_OPTION)


class Globals(msgspec.Struct, frozen=True):
    data_dir: str | None  # None: HEADRACE_DATA_DIR or the default
    url: str | None  # of an ingress; None: that of the running stack
    key: str | None = None  # an API key, for an ingress

    def __repr__(self) -> str:
        return f"Globals({self.data_dir!r}, {self.url!r})"

    def local_settings(self) -> Settings:
        """Settings without a look at what runs."""
        return settings_module.load(data_dir=self.data_dir)

    def data_path(self) -> Path:
        """The data directory, whatever its settings file says."""
        return Path(self.data_dir or os.environ.get("HEADRACE_DATA_DIR") or Settings().data_dir).absolute()

    def drain_budget_s(self) -> float:
        """That of the settings, or the default where they cannot be read: a stack must end all the same."""
        try:
            return self.local_settings().drain_budget_s
        except SettingsError:
            return Settings().drain_budget_s

    def settings(self) -> Settings:
        """Settings that reach the running stack, or the servers that were named by hand. Raises StackError."""
        if self.url is not None:
            raise typer.BadParameter("this command goes to the stack's own NATS, not to an ingress", param_hint="--url")
        settings = state.client_settings(data_dir=self.data_dir)
        if state.running(settings.data_path) is None and "nats_url" not in settings_module.given(
            data_dir=self.data_dir
        ):
            raise StackError(f"no stack is running on {settings.data_path}: `headrace up` starts one")
        return settings

    def http_url(self) -> str:
        """Where an ingress answers. Raises StackError."""
        if self.url is not None:
            return self.url.rstrip("/")
        data = self.local_settings().data_path
        stack = state.running(data)
        if stack is None:
            raise StackError(f"no stack is running on {data}: `headrace up` starts one, --url names another")
        return stack.http


def hide_key() -> None:
    """Begin anew with an API key in the environment if it is on the command line, where every user of the host reads it."""
    for place, word in enumerate(sys.argv[1:], 1):
        if not word.startswith("-"):
            if sys.argv[place - 1] in GLOBAL_OPTIONS:
                continue
            return  # the command, whose own options are others
        name, equals, value = word.partition("=")
        if name == KEY_OPTION and (equals or place + 1 < len(sys.argv)):
            value = value if equals else sys.argv[place + 1]
            rest = sys.argv[1:place] + sys.argv[place + (1 if equals else 2) :]
            os.environ[API_KEY] = value
            before = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
            os.execv(sys.executable, [*before, *rest])


def with_bus(context: typer.Context, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """What `work(bus)` comes to, on a bus of the stack that the command is about. Raises StackError or Unavailable."""
    from shared.bus import Bus

    given: Globals = context.obj

    async def run() -> T:
        bus = await Bus.connect(given.settings(), context.info_name or "headrace")
        try:
            return await work(bus)
        finally:
            await bus.close()

    return asyncio.run(run())


def audited(
    context: typer.Context,
    action: "Action",
    target: str,
    work: Callable[[Any], Coroutine[Any, Any, T]],
    **detail: Any,
) -> T:
    """`with_bus`, for what is to be in the audit log."""
    from shared import audit

    async def run(bus: Any) -> T:
        async with audit.audited(bus, audit.cli_actor(), action, target, **detail):
            return await work(bus)

    return with_bus(context, run)
