"""The scaler that the settings name."""

from collections.abc import Callable

from controller.scalers.base import Scaler
from controller.scalers.kubernetes import KubernetesScaler
from controller.scalers.process import ProcessScaler
from controller.scalers.static import StaticScaler
from shared.settings import Settings, SettingsError

SCALERS: dict[str, Callable[[Settings], Scaler]] = {
    "process": ProcessScaler,
    "kubernetes": KubernetesScaler,
    "static": lambda _settings: StaticScaler(),
}


def make_scaler(settings: Settings) -> Scaler:
    """A scaler that is not open yet. Raises SettingsError for a name that there is none of."""
    if settings.scaler not in SCALERS:
        raise SettingsError(f"scaler is {settings.scaler!r}, and has to be one of {', '.join(SCALERS)}")
    return SCALERS[settings.scaler](settings)
