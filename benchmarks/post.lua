local file = assert(io.open(os.getenv("BODY"), "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Content-Type"] = os.getenv("CONTENT_TYPE") or "application/octet-stream"
file:close()
