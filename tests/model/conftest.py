"""The model is a script and its modules: its folder is on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
