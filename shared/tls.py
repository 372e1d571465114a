"""TLS contexts of the connections that this process opens. Certificates are verified, always, and the host's name with them."""

import ssl

from shared.settings import SettingsError


def client_context(ca: str, cert: str, key: str, names: str) -> ssl.SSLContext:
    """For a connection to a server whose certificate is of an authority in the file `ca` ("": of the system's).

    `cert` and `key` are files of what is shown to the server, if it asks; "": nothing. `names` is the prefix of the settings.
    Raises SettingsError for files that cannot be used.
    """
    check_pair(cert, key, names)
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise SettingsError(f"{names}_ca: {ca} holds no certificates that can be read ({_why(error)})") from error
    if cert:
        load_pair(context, cert, key, names)
    return context


def check_pair(cert: str, key: str, names: str) -> None:
    """Raises SettingsError unless both are given, or neither."""
    if bool(cert) != bool(key):
        given, lacks = ("cert", "key") if cert else ("key", "cert")
        raise SettingsError(f"{names}_{given} is set and {names}_{lacks} is not: they go together")


def load_pair(context: ssl.SSLContext, cert: str, key: str, names: str) -> None:
    """Load a certificate and its key. Raises SettingsError that names the files, and nothing that is in them."""
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError too
        raise SettingsError(f"{names}_cert and {names}_key: {cert} and {key} are not usable ({_why(error)})") from error


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__ if not isinstance(error, ssl.SSLError) else error.reason or "no PEM"
