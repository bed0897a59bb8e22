"""Requests by urllib."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import ipaddress
import ssl
import threading

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from scaleray.common.http_client import HttpError, fetch


@pytest.fixture
def certificate(tmp_path):
    """File with a certificate for this machine that it has signed itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = made.add_extension(here, critical=False).sign(key, hashes.SHA256())
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file = tmp_path / "certificate.pem"
    pem = serialization.Encoding.PEM
    file.write_bytes(signed.public_bytes(pem) + key.private_bytes(pem, *form))
    return file


@contextlib.contextmanager
def answering(certificate):
    """URL of a server with this certificate."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"here")

        def log_message(self, *about):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


VARIABLES = ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_companys_certificate_is_taken_from_each_variable(certificate, monkeypatch, variable):
    with answering(certificate) as url:
        with pytest.raises(HttpError, match="certificate verify failed"):
            fetch(url, timeout_s=10)
        monkeypatch.setenv(variable, str(certificate))
        assert fetch(url, timeout_s=10) == b"here"


def test_certificates_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere.pem")
    with pytest.raises(HttpError, match=r"REQUESTS_CA_BUNDLE is /nowhere.pem: No such file"):
        fetch("https://127.0.0.1:9/", timeout_s=10)
