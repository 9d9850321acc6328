wrk.method = "POST"
wrk.body = '{"x":1}'
wrk.headers["Content-Type"] = "application/octet-stream"
