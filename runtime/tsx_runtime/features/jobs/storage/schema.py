"""The tables of a store, for SQLite and PostgreSQL.

Requests and answers have tables of their own, for two reasons: SQLite rewrites a whole row when one
column changes, and a list of jobs should not read bodies.
"""

from __future__ import annotations

VERSION = 1
TABLES = """
CREATE TABLE IF NOT EXISTS tsx_schema (version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS tsx_jobs (
  number {serial}, id TEXT NOT NULL UNIQUE, state TEXT NOT NULL, model TEXT NOT NULL,
  version TEXT NOT NULL, priority INTEGER NOT NULL,
  client TEXT NOT NULL, request_id TEXT NOT NULL, size BIGINT NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0, status INTEGER,
  created {real} NOT NULL, started {real}, finished {real}, expires {real}, deadline {real},
  callback TEXT NOT NULL,
  owner TEXT, lease {real}
);
CREATE INDEX IF NOT EXISTS tsx_jobs_queue
  ON tsx_jobs (state, model, version, priority DESC, number);
CREATE INDEX IF NOT EXISTS tsx_jobs_client
  ON tsx_jobs (client) WHERE state IN ('queued', 'running');
CREATE INDEX IF NOT EXISTS tsx_jobs_expires ON tsx_jobs (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS tsx_requests (
  id TEXT PRIMARY KEY, request_id TEXT NOT NULL, method TEXT NOT NULL, path TEXT NOT NULL,
  query {blob} NOT NULL,
  headers {blob} NOT NULL, body {blob} NOT NULL
);
CREATE TABLE IF NOT EXISTS tsx_answers (
  kind TEXT NOT NULL, scope TEXT NOT NULL, name TEXT NOT NULL, status INTEGER,
  fingerprint TEXT NOT NULL, expires {real} NOT NULL,
  headers {blob} NOT NULL, body {blob} NOT NULL, PRIMARY KEY (kind, scope, name)
);
CREATE INDEX IF NOT EXISTS tsx_answers_expires ON tsx_answers (expires);
CREATE INDEX IF NOT EXISTS tsx_answers_begun ON tsx_answers (kind) WHERE status IS NULL;
CREATE TABLE IF NOT EXISTS tsx_callbacks (
  id TEXT PRIMARY KEY, url TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
  due {real} NOT NULL, error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS tsx_callbacks_due ON tsx_callbacks (due)
"""
