"""`headrace nats-config`: a nats-server to which tenants may publish for themselves, each as nobody but itself.

A directory has the keys of all users, and what the server is told of them: whoever has a key there has an account. So the
command can be repeated with another tenant, and without a key its tenant is nobody.
"""

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from shared.errors import BadRequest
from shared.settings import SettingsError

OWN_KEY = "headrace.nk"
TENANTS = "tenants"
ACCOUNTS = "accounts.conf"
SERVER = "nats.conf"
FILE_NAME_CHARACTERS = 200  # a longer name is in folders: its parts, joined
MAPPING = "mapping.conf"  # of `headrace routes nats-mapping`, included where it is there

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", file_okay=False, help="Keys and configuration are kept here.")
]
TenantOption = Annotated[
    list[str] | None,
    typer.Option("--tenant", metavar="NAME", help="Give it a key, unless it has one. Can be repeated."),
]
Listen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Write a whole nats.conf as well, for a server that listens there."),
]
Store = Annotated[
    Path | None, typer.Option(metavar="DIR", help="With --listen: for JetStream's files (default DIR/jetstream).")
]
TlsCert = Annotated[Path | None, typer.Option(metavar="FILE", help="With --listen: a certificate with its chain, PEM.")]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="With --listen: its private key.")]


def nats_config(
    directory: Directory,
    tenant: TenantOption = None,
    listen: Listen = None,
    store: Store = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Accounts and keys of nats-server for Headrace and for tenants that publish over NATS themselves.

    Writes DIR/accounts.conf to include, and keys that are for their owners only: DIR/headrace.nk, the setting nats_nkey of
    Headrace's processes, and DIR/tenants/NAME.nk. Remove a tenant's key, run it again and reload the server: it is out.
    """
    from headrace.nats_accounts import server
    from headrace.stack.servers import MAX_PAYLOAD_BYTES
    from shared.tenants import check_name

    if listen is None and (store or tls_cert or tls_key):
        raise typer.BadParameter("--store, --tls-cert and --tls-key go with it", param_hint="--listen")
    if listen is not None and not _is_address(listen):
        raise typer.BadParameter("it is HOST:PORT", param_hint="--listen")
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key go together")
    for name in tenant or []:
        try:
            check_name(name)
        except BadRequest as error:
            raise typer.BadParameter(error.message, param_hint="--tenant") from error
    made = write_accounts(directory, tenant or [])
    written = [ACCOUNTS]
    if listen is not None:
        tls = None if tls_cert is None or tls_key is None else (str(tls_cert.absolute()), str(tls_key.absolute()))
        place = str((store or directory / "jetstream").absolute())
        _replace(directory / SERVER, server(listen, MAX_PAYLOAD_BYTES, place, ACCOUNTS, tls))
        written.append(SERVER)
    print("written:", *(directory / name for name in written))
    for path in made:
        print("new key:", path)


def write_accounts(directory: Path, new: list[str]) -> list[Path]:
    """Make the keys of `new` tenants that have none, and tell the server of all: the keys made. Raises SettingsError."""
    from headrace.nats_accounts import fragment
    from shared import nkey

    keys = directory / TENANTS
    directory.mkdir(parents=True, exist_ok=True)
    keys.mkdir(mode=0o700, exist_ok=True)
    made = []
    for path in [directory / OWN_KEY, *(_key_file(keys, name) for name in dict.fromkeys(new))]:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            nkey.create(path)
            made.append(path)
    tenants = {tenant: nkey.public_key(path) for path in keys.rglob("*.nk") if (tenant := _tenant_of(keys, path))}
    if len(set(tenants.values())) < len(tenants):
        raise SettingsError(f"two tenants have the same key in {keys}")
    mapping = MAPPING if (directory / MAPPING).exists() else ""
    _replace(directory / ACCOUNTS, fragment(nkey.public_key(directory / OWN_KEY), tenants, mapping))
    return made


def _is_address(text: str) -> bool:
    found = re.fullmatch(r"[^\s\"\\]*:([0-9]{1,5})", text)
    return found is not None and 0 < int(found[1]) < 1 << 16


def _key_file(keys: Path, tenant: str) -> Path:
    from shared import subjects

    token = subjects.encode_token(tenant)
    parts = [token[at : at + FILE_NAME_CHARACTERS] for at in range(0, len(token), FILE_NAME_CHARACTERS)]
    return keys.joinpath(*parts[:-1], f"{parts[-1]}.nk")


def _tenant_of(keys: Path, path: Path) -> str:
    """Whose key is in a file; "": put away in a folder, nobody's. Raises SettingsError for another name that is no tenant's."""
    from shared import subjects

    try:
        tenant = subjects.decode_token("".join(path.relative_to(keys).with_suffix("").parts))
    except ValueError:
        tenant = ""
    if tenant and _key_file(keys, tenant) == path:
        return tenant
    if path.parent == keys:
        raise SettingsError(f"{path} is named after no tenant: move it out of {keys}")
    return ""


def _replace(path: Path, text: str) -> None:
    """By a rename, since a server may be reading it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.rename(path)
