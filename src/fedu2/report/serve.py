"""The page of runs that are still training: a small web server for this machine alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedu2.errors import FedU2Error, UsageError
from fedu2.report.content import read_sheets
from fedu2.report.page import chart_data, page, sections

__all__ = ["ReportServer", "serve_report"]

log = logging.getLogger("fedu2")

LOOPBACK = ("127.0.0.1", "localhost")


def serve_report(paths: Sequence[Path], port: int = 0, announce: Callable[[str], None] = print) -> None:
    """Serve the live page until Ctrl-C; port 0 takes any that is free."""
    quiet = _Once()
    log.addFilter(quiet)  # a damaged line is read again with every question, and told once
    try:
        with ReportServer(paths, port) as server:
            announce(server.address)
            server.serve_forever()
    except KeyboardInterrupt:
        return
    finally:
        log.removeFilter(quiet)


class ReportServer(ThreadingHTTPServer):
    """Answers with the page and its data, and with nothing else of the file system."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        self.paths = paths
        read_sheets(paths, waiting=True)  # what is wrong from the start is told now
        try:
            super().__init__((LOOPBACK[0], port), _Handler)
        except OSError as error:
            raise UsageError(f"cannot serve on port {port}: {error.strerror}") from None

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK[0]}:{self.server_port}/"

    def page(self) -> str:
        """The page as it is now, without figures, which would take minutes."""
        return page(read_sheets(self.paths, waiting=True), live=True)

    def data(self) -> str:
        """What the page asks for again and again: points for the charts, and the parts made of text."""
        sheets = read_sheets(self.paths, waiting=True)
        return json.dumps({**chart_data(sheets), "sections": sections(sheets)}, allow_nan=False)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version = "fedu2"
    sys_version = ""
    timeout = 30  # seconds for a client to say what it wants

    def do_GET(self) -> None:
        if not self._asked_here():
            return self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine alone")
        answers = {"/": ("text/html", self.server.page), "/data.json": ("application/json", self.server.data)}
        path = self.path.partition("?")[0]
        if path not in answers:
            return self.send_error(HTTPStatus.NOT_FOUND)
        kind, make = answers[path]
        try:
            body = make().encode()
        except (FedU2Error, OSError) as error:  # a file that is just being written, perhaps; the page asks again
            log.warning("%s", error)
            return self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)
        return None

    def _asked_here(self) -> bool:
        """Whether the browser was sent to this machine by its own name, not by a foreign one that now points here."""
        name, _, port = self.headers.get("Host", "").rpartition(":")
        return (name or port).lower() in LOOPBACK

    def log_message(self, format: str, *arguments: object) -> None:
        """Every question every two seconds is not worth a line."""


class _Once(logging.Filter):
    """Lets every message pass once."""

    def __init__(self) -> None:
        super().__init__()
        self.told: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self.told
        self.told.add(message)
        return new
