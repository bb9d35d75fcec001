"""Tokens of a service's clients: made, looked up by their digest, and revoked."""

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from hashlib import sha256
from hmac import compare_digest
from secrets import token_urlsafe
from typing import Literal

from sqlalchemy import insert, select, update

from autotuner.database.retrying import retried
from autotuner.database.tables import TokenRow
from autotuner.database.transactions import Transactions
from autotuner.errors import InputError, NotFoundError

Role = Literal["reader", "submitter", "admin"]
ROLES: tuple[Role, ...] = ("reader", "submitter", "admin")
"""Each may do what those before it may."""

PREFIX = "autotuner_"
"""Of every token, so that one is recognised where it should not be, as in a log or a repository."""

NAME_MAX = 100


@dataclass(frozen=True, slots=True)
class Token:
    """A client's token as the database has it: without the secret text, which is shown once, when it is made.

    Args:
        digest: sha256 of the token, in hex.
        name: for people.
        expires_at: None for one that is valid until it is revoked.
    """

    id: int
    digest: str
    name: str
    role: Role
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    @property
    def state(self) -> Literal["valid", "expired", "revoked"]:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= datetime.now(UTC) else "valid"


def digest_of(secret: str) -> str:
    """Return what is kept of a token: its sha256.

    One round of a fast hash is right for a token of 256 random bits, since nobody can try them out: salts and slow
    hashes are for passwords, which people choose and others guess. A digest is no secret that lets anybody in.
    """
    return sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class SqlTokens:
    """Tokens in a database. A row stays when its token is revoked, so that its number is never another's."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def create(self, name: str, role: Role, expires_at: datetime | None = None) -> tuple[Token, str]:
        """Store a new token, and return it with the secret text that its owner sends.

        Raises:
            InputError: the name is too long or not printable, the role is none, or the token would be expired.
        """
        if len(name) > NAME_MAX or not name.isprintable():
            raise InputError(
                f"the name of a token is {name[:NAME_MAX]!r}: give at most {NAME_MAX} printable characters"
            )
        if role not in ROLES:
            raise InputError(f"no role {role!r}; known: {', '.join(ROLES)}")
        if expires_at is not None and expires_at <= datetime.now(UTC):
            raise InputError(f"the token would have expired at {expires_at.isoformat()}: give a time to come")
        secret = PREFIX + token_urlsafe(32)
        return self._insert(digest_of(secret), name, role, expires_at), secret

    @retried
    def _insert(self, digest: str, name: str, role: Role, expires_at: datetime | None) -> Token:
        statement = insert(TokenRow).values(
            digest=digest, name=name, role=role, created_at=datetime.now(UTC), expires_at=expires_at
        )
        with self._transactions.writing() as connection:
            row = connection.execute(statement.returning(*COLUMNS)).one()
            return Token(**row._mapping)

    @retried
    def find(self, secret: str) -> Token | None:
        """Return what is known of a token, also of one that is expired or revoked; None where it was never made.

        The time of the look-up tells nothing of a token: the index compares digests, whose beginning nobody can choose,
        and the digest that is found is compared as a whole.
        """
        digest = digest_of(secret)
        with self._transactions.reading() as connection:
            row = connection.execute(select(*COLUMNS).where(TokenRow.digest == digest)).one_or_none()
        return Token(**row._mapping) if row is not None and compare_digest(row.digest, digest) else None

    @retried
    def all(self) -> list[Token]:
        """Return every token that was made, in the order of their numbers."""
        with self._transactions.reading() as connection:
            return [Token(**row._mapping) for row in connection.execute(select(*COLUMNS).order_by(TokenRow.id))]

    @retried
    def exist(self) -> bool:
        """Say whether a token was ever made, also where it is revoked by now."""
        with self._transactions.reading() as connection:
            return connection.execute(select(TokenRow.id).limit(1)).one_or_none() is not None

    @retried
    def revoke(self, token_id: int) -> Token:
        """End a token; one that is revoked already stays as it is.

        Raises:
            NotFoundError: there is none of this number.
        """
        revoked = update(TokenRow).where(TokenRow.id == token_id, TokenRow.revoked_at.is_(None))
        with self._transactions.writing() as connection:
            connection.execute(revoked.values(revoked_at=datetime.now(UTC)))
            row = connection.execute(select(*COLUMNS).where(TokenRow.id == token_id)).one_or_none()
        if row is None:
            raise NotFoundError(
                f"{self._transactions.shown} has no token {token_id}: `autotuner token list` lists them"
            )
        return Token(**row._mapping)


COLUMNS = [getattr(TokenRow, field.name) for field in fields(Token)]
