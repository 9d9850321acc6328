"""The apps of a server's listeners, with the routes of the roles that each listener has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial

from tsx_runtime.api.access.tokens import Keys
from tsx_runtime.api.likely_paths import LikelyPaths
from tsx_runtime.api.urls import runs_model
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.asgi_lane.predictions import Predictions
from tsx_runtime.http.context import ServerContext
from tsx_runtime.http.lanes import make_lane
from tsx_runtime.http.routes import (
    exception_handlers,
    health,
    index,
    kserve,
    management,
    model_paths,
)
from tsx_runtime.http.routes import plugins as plugin_routes
from tsx_runtime.metrics import collection
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import ROLES, Settings

SEPARATE_LISTENERS = tuple((role,) for role in ROLES)


def build_apps(
    registry: Registry,
    settings: Settings,
    listeners: Sequence[Collection[str]] = SEPARATE_LISTENERS,
    keys: Keys | None = None,
    addresses: Mapping[str, str] | None = None,
) -> list[ServerApp]:
    """Build one app for each listener, with the routes of the roles that share its address.

    Args:
        registry: The models.
        settings: The settings of the server.
        listeners: The roles of each listener.
        keys: The tokens; None reads them from the settings.
        addresses: The actual address of each role, which overrides that of the settings.
    """
    context = ServerContext(settings, registry, keys, addresses or {})
    apps = [_build_app(context, [role for role in ROLES if role in roles]) for roles in listeners]
    addresses_by_role = {role: getattr(settings, f"{role}_address") for role in ROLES} | dict(
        context.addresses
    )
    _share_paths({" and ".join(app.roles): app for app in apps}, addresses_by_role)
    return apps


def _build_app(context: ServerContext, roles: Collection[str]) -> ServerApp:
    registry, guards = context.registry, context.guards
    app = ServerApp(context, roles)
    app.lane_of = cache(partial(make_lane, app))
    exception_handlers.add_exception_handlers(app, app.not_found)
    index.add_routes(app, registry, guards.inference, roles)
    # The routes of features come first, because routes such as `/models/NAME/VERSION` would match
    # their last segment as a version.
    for feature in registry.features:
        feature.add_routes(app)
    if "inference" in roles:
        _add_predictions(app)
    if "management" in roles:
        router = management.build_router(registry, context.max_management_body)
        app.add_routes(router, {"models": guards.management})
        if context.keys.api is not None:
            app.add_routes(management.build_token_router(context.keys), {"token": guards.token})
    if "metrics" in roles:
        router = collection.build_router(registry, context.counts, context.system)
        app.add_routes(router, {"metrics": guards.metrics})
    _add_endpoints(app)
    app.add_routes(health.build_router(registry, roles))
    app.add_routes(kserve.build_router(registry, roles), {"v2": guards.inference})
    return app


def _add_predictions(app: ServerApp) -> None:
    settings = app.context.settings
    app.predictions = Predictions(
        app.context.registry,
        settings.max_request_size,
        app.context.guards.inference,
        app.counts,
        model_paths.describe_predictions,
        settings.server_timing_share,
        app.is_confined,
    )
    app.model_apps.append((lambda scope: runs_model(scope["path"]), app.predictions))


def _add_endpoints(app: ServerApp) -> None:
    """Add the endpoints of plugins for the roles of a listener.

    Raises:
        SettingError: A path cannot be used; see `check_paths`.
    """
    registry, limit = app.context.registry, app.context.settings.max_request_size
    all_endpoints = registry.plugins.endpoints.values()
    plugin_routes.check_paths(all_endpoints)
    for role in ("inference", "management"):
        endpoints = [
            endpoint for endpoint in all_endpoints if endpoint.role == role and role in app.roles
        ]
        segments = {endpoint.path.split("/")[1] for endpoint in endpoints} - {"ping"}
        guard = getattr(app.context.guards, role)
        router = plugin_routes.build_router(endpoints, registry, limit)
        app.add_routes(router, dict.fromkeys(segments, guard))


def _share_paths(apps: Mapping[str, ServerApp], addresses: Mapping[str, str]) -> None:
    """Set the paths and addresses of the other listeners, for an app's errors and index.

    The keys of `apps` are roles. Addresses are set only if no other machine can connect.
    """
    is_local = all(parse_address(address).is_local for address in addresses.values())
    for app in apps.values():
        other_apps = {roles: other_app for roles, other_app in apps.items() if other_app is not app}
        if is_local:
            app.other_addresses = {
                roles: addresses[roles.partition(" ")[0]] for roles in other_apps
            }
        labels = {
            roles: f"the {roles} address{f', {app.other_addresses[roles]}' if is_local else ''}"
            for roles in other_apps
        }
        app.likely_paths = LikelyPaths(
            app.paths, {labels[roles]: other_app.paths for roles, other_app in other_apps.items()}
        )
