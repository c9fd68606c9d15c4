"""A certification authority of a test's own, in the forms in which real clusters have one."""

import datetime
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass
class Authority:
    """`key_usage`: whether its certificate says what the key is for. `identifiers`: whether certificates name the keys
    that they are of and were signed with. Without either they are valid, but not as RFC 5280 wants them; clusters on
    EKS have such ones.
    """

    key_usage: bool = True
    identifiers: bool = True
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        builder = _builder(_name("ca"), _name("ca"), self.key.public_key(), 30 * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        if self.key_usage:
            usage = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "digital_signature": True}
            builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
        if self.identifiers:
            identifier = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())
            builder = builder.add_extension(identifier, critical=False)
        self._certificate = builder.sign(self.key, hashes.SHA256())

    @property
    def pem(self) -> str:
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def issue(
        self, folder: Path, name: str, *hosts: str, organization: str = "", days: int = 30, file: str = ""
    ) -> tuple[Path, Path]:
        """`file`.crt and .key in the folder (`name`.… by default): for these addresses and names of a server, so many
        days long (less than 0: expired).
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name, organization), _name("ca"), key.public_key(), days * DAY)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), False)
        if self.identifiers:
            signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
            builder = builder.add_extension(signer, critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        paths = (folder / f"{file or name}.crt", folder / f"{file or name}.key")
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(private_pem(key))
        return paths


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    begin, end = (now - DAY, now + life) if life > DAY * 0 else (now - 30 * DAY, now + life)
    return x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key).serial_number(
        x509.random_serial_number()
    ).not_valid_before(begin).not_valid_after(end)  # fmt: skip


def _name(common: str, organization: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization)] if organization else []
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
