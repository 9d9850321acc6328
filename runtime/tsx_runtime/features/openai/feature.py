"""The feature `openai`, which documents OpenAI's API and lists the models for its clients.

`tsx_runtime.api.openai` routes the requests of this API to models, whose handlers answer them.
"""

from __future__ import annotations

from typing import Any

from tsx_runtime.feature import Feature, ServerApp

# The summary and an example body of each path.
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("Chat", {"messages": [{"role": "user", "content": "Hello"}]}),
    "/v1/completions": ("Complete a text", {"prompt": "Once"}),
    "/v1/responses": ("Answer a text", {"input": "Hello"}),
    "/v1/embeddings": ("Embed texts", {"input": ["a sentence"]}),
    "/v1/audio/transcriptions": ("Transcribe speech", {"file": "the bytes of a sound file"}),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        ("Rank texts by a query", {"query": "pandas", "documents": ["a bear"]}),
    ),
}


class OpenAIFeature(Feature):
    def add_routes(self, app: ServerApp) -> None:
        from tsx_runtime.features.openai import routes  # imports FastAPI
        from tsx_runtime.http.routes.openapi import named_in_body

        guards, is_inference = app.context.guards, "inference" in app.roles
        app.guards["v1"] = guards.inference if is_inference else guards.management
        if is_inference:
            app.document(
                {path: named_in_body(path, "openai", *entry) for path, entry in EXAMPLES.items()}
            )
        if is_inference or "management" in app.roles:
            app.add_routes(routes.build_router(self.registry))
