"""Routes of tokens: who asks, and for an admin the tokens of all clients."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Request, Response

from autotuner.database import Database, Role
from autotuner.errors import NotFoundError
from autotuner.server.http.access import Access
from autotuner.server.http.documentation import refusals
from autotuner.server.http.examples import NEW_TOKENS
from autotuner.server.http.problems import Refusal
from autotuner.server.http.strict import StrictRoute
from autotuner.server.wire.requests import NewToken
from autotuner.server.wire.responses import CallerView, MadeTokenView, TokenView
from autotuner.server.wire.values import Id

TokenId = Annotated[Id, Path(description="Of a token, as `GET /v1/tokens` has it.", examples=[3])]


TO_REVOKE: dict[str, Any] = {
    "revoke": {
        "operationId": "revoke_token",
        "description": "End the token.",
        "parameters": {"token_id": "$response.body#/made/id"},
    }
}


class AdminRoute(StrictRoute):
    """A route for admins alone, also where it only reads."""

    @property
    def role(self) -> Role:
        return "admin"


def token_routes(database: Database, access: Access, version: str) -> APIRouter:
    routes = APIRouter(tags=["service"])
    for_readers, for_admins = APIRouter(route_class=StrictRoute), APIRouter(route_class=AdminRoute)

    @for_readers.get(
        "/v1/caller",
        operation_id="get_caller",
        summary="Say who asks",
        responses={200: {"description": "The client and its role."}, **refusals()},
    )
    def caller(request: Request) -> CallerView:
        """Return the name and the role that the service has of who asks, and whether it asks for tokens."""
        found = request.state.caller
        return CallerView(name=found.name, role=found.role, needs_token=not access.open, version=version)

    @for_admins.get(
        "/v1/tokens",
        operation_id="list_tokens",
        summary="List tokens",
        responses={200: {"description": "Every token that was made."}, **refusals()},
    )
    def tokens() -> list[TokenView]:
        """Return every token that was made, also revoked and expired ones; the tokens themselves are kept nowhere."""
        return [TokenView.model_validate(token) for token in database.tokens.all()]

    @for_admins.post(
        "/v1/tokens",
        status_code=201,
        operation_id="make_token",
        summary="Make a token",
        response_description="The token, which is shown this once.",
        responses={
            201: {"description": "The token, which is shown this once.", "links": TO_REVOKE},
            **refusals(408, 409, 413, 415),
        },
    )
    def make(token: Annotated[NewToken, Body(openapi_examples=NEW_TOKENS)], response: Response) -> MadeTokenView:
        """Make a token for a client. Its text is in this answer and nowhere else.

        The first token of a service is made by `autotuner token create`, since from then on everybody needs one.
        """
        _check_tokens(access)
        days = token.expires_in_days
        made, secret = database.tokens.create(
            token.name, token.role, None if days is None else datetime.now(UTC) + timedelta(days=days)
        )
        response.headers["Cache-Control"] = "no-store"
        return MadeTokenView(token=secret, made=TokenView.model_validate(made))

    @for_admins.post(
        "/v1/tokens/{token_id}/revoke",
        operation_id="revoke_token",
        summary="Revoke a token",
        responses={200: {"description": "The token, revoked."}, **refusals(404, 409, 413, 415)},
    )
    def revoke(token_id: TokenId, request: Request) -> TokenView:
        """End a token; every process of the service refuses it some seconds later. One that is revoked stays so.

        A token cannot revoke itself: then there might be none left that may.
        """
        _check_tokens(access)
        if request.state.caller.name == f"token {token_id}":
            raise Refusal(
                409, f"token {token_id} asks this itself: use another one, or `autotuner token revoke {token_id}`"
            )
        try:
            return TokenView.model_validate(database.tokens.revoke(token_id))
        except NotFoundError:
            raise NotFoundError(f"no token {token_id}: GET /v1/tokens lists those that there are") from None

    routes.include_router(for_readers)
    routes.include_router(for_admins)
    return routes


def _check_tokens(access: Access) -> None:
    """Check that a service has tokens.

    Raises:
        Refusal: 409, it has none, and would ask everybody for one once it had.
    """
    if access.open:
        raise Refusal(
            409,
            "this service answers this machine without tokens, and would ask everybody for one: make the first by "
            "`autotuner token create NAME --role admin`",
        )
