"""What systemd wants to be told: READY=1 when the mount serves, STOPPING=1 when it ends (sd_notify(3))."""

from __future__ import annotations

import os
import socket


def notify(message: str) -> None:
    """Send a message to the service manager, if one listens. It is a courtesy: a failure changes nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        try:
            channel.sendto(message.encode(), address)
        except OSError:
            # The manager went away: it learns of the mount by itself.
            return
