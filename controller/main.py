"""The controller's process: one loop until SIGTERM or SIGINT. Its workers live on; the stack's supervisor ends them."""

import asyncio
import logging
import signal
import sys

from controller.loop import Controller
from controller.metrics import Metrics
from controller.scalers.choose import make_scaler
from shared import lifeline
from shared.blobs import verifier
from shared.bus import Bus
from shared.errors import Unavailable
from shared.log import configure_logging
from shared.settings import Settings, SettingsError, load

log = logging.getLogger(__name__)


async def serve(settings: Settings) -> None:
    """Run the controller until a signal ends it. Raises Unavailable when NATS is away at the start."""
    metrics = Metrics()
    bus = await Bus.connect(settings, "controller")
    try:
        controller = Controller(bus, settings, make_scaler(settings), metrics, verifier(settings))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, controller.stop)
        loop.add_signal_handler(signal.SIGCHLD, controller.wake)
        metrics.serve(settings.http_host, settings.controller_metrics_port)
        log.info("controller: metrics at http://%s:%d/metrics", settings.http_host, metrics.port)
        await controller.run()
    finally:
        metrics.close()
        await bus.close()


def main(settings: Settings) -> None:
    """Run the process; exits with 1 when NATS cannot be reached."""
    configure_logging(settings)
    if settings.lifeline_fd is not None:
        lifeline.watch(settings.lifeline_fd)
    try:
        asyncio.run(serve(settings))
    except KeyboardInterrupt:  # before the loop had its handler
        sys.exit(130)
    except (Unavailable, SettingsError) as error:
        log.error("the controller cannot start: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main(load())
