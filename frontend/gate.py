"""Which requests are let in: by the matched route and the key, before anything of the body is read.

Owns the list of open routes and that of admin routes; every other route, those that do not exist included, needs a key as soon
as there is one. Looks at the route that was matched, never at the path as sent. Called by the middleware of `frontend.app`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from frontend.admin import OPTION as ADMIN_OPTION
from frontend.admin import AdminKeys, not_admin
from frontend.api_keys import ApiKeys
from frontend.errors import ApiError
from frontend.rate_limit import RateLimits

# What load balancers, orchestrators and Prometheus read; none changes anything or tells a prompt. /version is not among them:
# it tells an attacker where to begin.
OPEN_ROUTES = frozenset({"/health", "/ready", "/ping", "/metrics", "/metrics/", "/metrics/engine", "/metrics/frontend"})
ADMIN_ROUTES = frozenset({"/start_profile", "/stop_profile"})
ADMIN_SCOPE = "admin"
MISSING, UNKNOWN, NOT_ADMIN = "missing_key", "unknown_key", "not_admin"


class Gate:
    """Without keys everything but the admin routes is open."""

    def __init__(self, keys: ApiKeys | None = None, limits: RateLimits | None = None) -> None:
        self.keys = ApiKeys() if keys is None else keys
        self.limits = RateLimits(None, None) if limits is None else limits
        self._unauthorized = dict.fromkeys((MISSING, UNKNOWN, NOT_ADMIN), 0)

    @property
    def unauthorized(self) -> Mapping[str, int]:
        """Requests refused with 401, by reason."""
        return self._unauthorized

    @contextmanager
    def enter(self, route: str, authorization: str | None, admin: AdminKeys) -> Iterator[str]:
        """For the time of one request; gives the scope of its text. `route`: the matched route's template.

        The scope is one per client and the same in every frontend: what drafters learn in one never drafts in another.
        Without keys there is one client, and its scope is "". Raises ApiError 401, and 429 on entering.
        """
        if route in ADMIN_ROUTES:
            if not admin.allows(authorization):
                self._unauthorized[NOT_ADMIN] += 1
                raise not_admin(ADMIN_OPTION if admin.digests else None)
            yield ADMIN_SCOPE
        elif not self.keys or route in OPEN_ROUTES:
            yield ""
        elif (client := self.keys.client(authorization)) is not None:
            with self.limits.enter(client):
                yield client.scope
        elif admin.allows(authorization):  # an admin's requests carry the admin's key, which has no limits
            yield ADMIN_SCOPE
        else:
            raise self._refusal(authorization)

    def _refusal(self, authorization: str | None) -> ApiError:
        if authorization is None:
            self._unauthorized[MISSING] += 1
            return ApiError(401, "this server needs an API key: Authorization: Bearer KEY", code="invalid_api_key")
        self._unauthorized[UNKNOWN] += 1
        return ApiError(401, "the API key is not one of this server's", code="invalid_api_key")
