"""One log format for every process: UTC time, level, module, message. Secrets and prompts are never passed to it."""

import logging
import sys
import time

from shared.settings import Settings


def configure_logging(settings: Settings) -> None:
    """Send records of `settings.log_level` and up to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name in ("httpx", "httpcore", "urllib3", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
