// The page `/docs`: Swagger UI shows the OpenAPI document of the address that it is at.

SwaggerUIBundle({ url: "openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null });
