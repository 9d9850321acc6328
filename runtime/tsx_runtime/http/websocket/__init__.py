"""Connections that have become WebSockets; `asgi_lane/websockets.py` says what their messages are"""
