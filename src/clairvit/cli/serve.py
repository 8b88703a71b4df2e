"""`clairvit serve`: a web page that explains what a model predicts."""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
from typing import TYPE_CHECKING

from clairvit.cli import options
from clairvit.cli.console import print_data_notes, print_line, print_message
from clairvit.cli.declare import option
from clairvit.errors import BadInput, importing

if TYPE_CHECKING:
    from clairvit.web.middleware import AccessRules

AUTO = "auto"
MIN_TOKEN = 16  # characters: guesses are not slowed down, so they must be hopeless


def serve(
    *,
    model: list[str] | None = options.model_list(
        "Models, separated by commas or repeated: -m pets -m timm:vit_base_patch16_224."
    ),
    model_options: options.ModelOptions,
    host: str = option("127.0.0.1", "The address to listen at; the default is this machine only."),
    port: int = option(8000, "0: any free port.", min=0, max=65535),
    token: str | None = option(
        None,
        "Clients must send it (shared machines; other users can see command lines, so use the variable).",
        "SECRET|auto",
        shown="none; generated where --host is not this machine",
        envvar="CLAIRVIT_TOKEN",
    ),
    recipe: list[str] | None = option(
        None, "A calibrated recipe that the page offers as a method; may be repeated.", "FILE.json"
    ),
    time_limit: float = option(300.0, "Seconds that one request may take.", min=1),
) -> None:
    """Open a web page to look inside a model: drop a photo in, click a class, move a slider.

    [bold]Examples[/bold]

    clairvit serve

    clairvit serve --model timm:vit_base_patch16_224 --port 8080

    clairvit serve --host 0.0.0.0 --token auto
    """
    with importing("The web page", extra="web"):
        from clairvit.web.server import run
    from clairvit.web.state import create_state

    names = options.model_names(model)
    if len(names) > 1 and (model_options.arch or model_options.labels or model_options.preprocess()):
        raise BadInput(
            "--arch, --labels and preprocessing are of one model, and several were given. Serve them one by one; or "
            "load each in a Python file, such as first = cv.load('file:first.safetensors', …) in mymodels.py, and name "
            "them: -m mymodels:first -m mymodels:second."
        )
    model_options.preprocess()
    rules = access_rules(host, token)
    with listen(host, port) as listener:
        models = [model_options.load(name) for name in names]
        print_data_notes((note for net in models for note in net.assumptions), hidden=False)
        state = create_state(models, time_limit, recipe or [])
        for card in state.cards:
            if not card.labels:
                print_message(
                    f"note: {card.name} has no class names, so the page shows where it looks and explains no class; "
                    "--labels gives it names."
                )
        print_line(f"Open {address_of(host, listener.getsockname()[1], rules.token)}  (Ctrl-C stops)")
        if not is_loopback(host):
            print_message(
                "note: other machines can reach this server, without encryption; on networks you share use HTTPS."
            )
        run(state, rules, listener)


def address_of(host: str, port: int, token: str | None) -> str:
    """Return the URL. The token is in the fragment, which browsers never send, so it is in no log."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/{f'#token={token}' if token else ''}"


def access_rules(host: str, token: str | None) -> AccessRules:
    """Return which host names and which token are accepted: loopback names only, elsewhere never without a token."""
    from clairvit.web.middleware import AccessRules

    if token is not None and token != AUTO and len(token) < MIN_TOKEN:
        raise BadInput(
            f"--token has {len(token)} characters; expected {MIN_TOKEN} or more, or 'auto' to have one generated."
        )
    if token is not None and not all(letter.isascii() and (letter.isalnum() or letter in "-_.~") for letter in token):
        raise BadInput("--token has characters that do not fit into an address; expected letters, digits and - _ . ~")
    local = is_loopback(host)
    if token == AUTO or (token is None and not local):
        token = secrets.token_urlsafe(24)
    return AccessRules(token, frozenset({"localhost", "127.0.0.1", "[::1]", host.lower()}) if local else frozenset())


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Bind the port before models are loaded, so that a port in use is reported at once."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        is_about_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = "--port 0 takes any that is free" if is_about_port else "--host 127.0.0.1 is this machine"
        reason = str(error.strerror or error).partition(" (")[0]  # Python repeats the address in brackets
        raise BadInput(f"Cannot listen at {host}, port {port} ({reason}); {advice}.") from error
