// A requester process: it publishes requests to the queue, tells workers and hears them. What happens to one request is in
// stream.js.

import { randomInt } from "node:crypto";
import { Events, headers } from "nats";
import { token } from "./names.js";
import { GENERATION, HeadraceError, newId, QUEUE_DEADLINE, Stream } from "./stream.js";

const HOLD = 2000; // ms; after our own reconnect everybody seems absent for a moment
const TICK = 100;
const QUEUE_FULL = 10077; // of JetStream

/** A process that publishes as a tenant, or without accounts as `local`. */
export class Requester {
  constructor(nc) {
    this.nc = nc;
    this.streams = new Map();
    this.holdUntil = 0;
    this.statuses = `_INBOX.${newId()}`; // no responders come back here, with the worker as last token
  }

  async start() {
    const { tenant } = await this.ask("headrace.whoami", {});
    this.tenant = tenant;
    this.owner = token(tenant);
    this.address = `tok.${this.owner}.json-${newId()}`; // json-: frames come as JSON
    this.nc.subscribe(this.address, { callback: (_, message) => this.onFrames(message.json()) });
    this.nc.subscribe(`${this.statuses}.*`, { callback: (_, message) => this.onStatus(message) });
    await this.nc.flush(); // listening before anything is published
    this.ticking = setInterval(() => this.streams.forEach((stream) => stream.tick(Date.now())), TICK);
    this.watch();
  }

  async close() {
    this.streams.forEach((stream) => stream.cancel());
    clearInterval(this.ticking);
    await this.nc.drain();
  }

  /** Ask a service of an ingress. */
  async ask(subject, question) {
    const answer = (await this.nc.request(subject, JSON.stringify(question), { timeout: 30_000 })).json();
    if (answer.error) throw new HeadraceError(answer.error.code, answer.error.message);
    return answer;
  }

  /** Store a request for `model` (or model@version, model@alias) in the queue: its stream. `sampling` is of shared/wire.py. */
  async submit(model, prompt, sampling = {}) {
    const routed = await this.ask("headrace.route", { model });
    const request = {
      rid: newId(),
      model: routed.model,
      version: routed.version,
      movable: routed.movable,
      input: { prompt },
      sampling: { seed: randomInt(2 ** 47), ...sampling }, // any worker draws the same tokens
    };
    const stream = new Stream(this, request, Date.now() + QUEUE_DEADLINE);
    this.streams.set(request.rid, stream);
    await this.publish(stream, request.rid, false);
    return stream;
  }

  async publish(stream, messageId, resume) {
    const { model, version } = stream.request;
    const queueMs = Math.max(0, stream.deadline - Date.now());
    const given = headers();
    given.set("Nats-Msg-Id", messageId); // a try again is stored once
    given.set("Nats-TTL", String(Math.ceil((QUEUE_DEADLINE + GENERATION) / 1000) + 75));
    given.set("Content-Type", "application/json");
    given.set("Hr-Wire", "1");
    given.set("Hr-Reply", this.address);
    given.set("Hr-Queue-Deadline", String(Date.now() + queueMs));
    given.set("Hr-Queue-Ms", String(queueMs));
    given.set("Hr-Generation-Ms", String(stream.claims.size ? queueMs : GENERATION));
    if (resume) given.set("Hr-Resume", "1");
    const subject = `q.${token(model)}.${token(version)}.fair.${this.owner}`;
    stream.publishing = true;
    for (let tries = 5; ; tries--) {
      try {
        const ack = (await this.nc.request(subject, JSON.stringify(stream.request), { headers: given, timeout: 3000 })).json();
        if (ack.error?.err_code === QUEUE_FULL) throw new HeadraceError("queue_full", ack.error.description);
        if (ack.error) throw new HeadraceError("bus_unavailable", ack.error.description);
        if (!stream.worker) stream.seq = ack.seq;
        break;
      } catch (error) {
        if (stream.claims.size) break; // a worker has it: the ack was lost
        if (tries === 1 || error.code === "queue_full") return stream.end(error);
      }
    }
    stream.publishing = false;
    this.nc.publish(`wake.${token(model)}.${token(version)}`, JSON.stringify([this.tenant]));
  }

  publishAgain(stream) {
    stream.copies += 1;
    this.publish(stream, `${stream.rid}.${token(stream.request.version)}.${stream.copies}`, true);
  }

  tell(worker, item) {
    const reply = `${this.statuses}.${worker}`; // without an answer: but who is dead has no responders
    this.nc.publish(`ctl.worker.${worker}.items.${this.owner}`, JSON.stringify([[item]]), { reply });
  }

  release(worker, rid, sid, done) {
    this.tell(worker, ["r", rid, sid, this.address, done]);
  }

  broadcast({ model, version }, item) {
    this.nc.publish(`ctl.model.${token(model)}.${token(version)}.attach.${this.owner}`, JSON.stringify([[item]]));
  }

  onFrames([worker, items]) {
    for (const item of items) {
      const [kind, rid] = item;
      const stream = this.streams.get(rid);
      if (!stream) {
        if ("afo".includes(kind)) this.release(worker, rid, kind === "a" ? "" : item[3], true);
      } else if (kind === "a") stream.accepted(worker, item[2], item[3]);
      else if (kind === "f") stream.frame(worker, item);
      else if (kind === "o") stream.ok(worker, item[2], item[3], item[4]);
      else if (kind === "w") stream.wait(worker, item[3]);
      else if (kind === "n") stream.no(worker, item[2]);
    }
  }

  onStatus(message) {
    if (message.headers?.code !== 503) return;
    const worker = message.subject.split(".").pop();
    this.streams.forEach((stream) => stream.noResponders(worker, Date.now()));
  }

  async watch() {
    for await (const { type } of this.nc.status()) {
      if (type === Events.Disconnect) this.holdUntil = Infinity;
      if (type !== Events.Reconnect) continue;
      this.holdUntil = Date.now() + HOLD;
      this.streams.forEach((stream) => stream.reconnected());
    }
  }
}
