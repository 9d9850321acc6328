"""Rules that both HTTP lanes obey: URLs, headers, errors, access log."""
