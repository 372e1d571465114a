// What every program needs: a connection with a tenant's key, and names as tokens of subjects.

import { readFileSync } from "node:fs";
import { connect, nkeyAuthenticator } from "nats";

/** A connection to NATS_URL. NATS_SEED is the file with the tenant's key, of headrace nats-config; without accounts there is none. */
export function connectAsTenant() {
  const { NATS_URL: servers, NATS_SEED: file } = process.env;
  const authenticator = file ? nkeyAuthenticator(Buffer.from(readFileSync(file, "utf8").trim())) : undefined;
  return connect({ servers, authenticator, waitOnFirstConnect: true, maxReconnectAttempts: -1 });
}

/** A name as one token of a subject: each byte outside [A-Za-z0-9_-] becomes =XX. */
export function token(name) {
  const plain = (byte) => /[A-Za-z0-9_-]/.test(String.fromCharCode(byte));
  const escape = (byte) => "=" + byte.toString(16).toUpperCase().padStart(2, "0");
  return [...Buffer.from(name)].map((byte) => (plain(byte) ? String.fromCharCode(byte) : escape(byte))).join("");
}
