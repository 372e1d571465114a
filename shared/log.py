"""One log format for every process: UTC time, level, module, message. Secrets and prompts are never passed to it."""

import logging
import sys
import time

from shared import tenants
from shared.settings import Settings


class _Formatter(logging.Formatter):
    """API keys are never passed to a log; one that gets into a record all the same, in an error of a library, is left out."""

    def format(self, record: logging.LogRecord) -> str:
        return tenants.redacted(super().format(record))


def configure_logging(settings: Settings) -> None:
    """Send records of `settings.log_level` and up to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = _Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name in ("httpx", "httpcore", "urllib3", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
