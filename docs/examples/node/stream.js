// One request of a requester: the table of docs/protocol.md, "Requester", with a tenant's rights. Each token arrives once, in
// order, whatever worker dies meanwhile. One choice a request. What it says to workers is said by requester.js.

import { randomBytes } from "node:crypto";

const SILENCE = 500; // all times in ms: without a frame for so long, ask the worker again
const ATTACH_TIMEOUT = 1000;
const SEEK_EVERY = 1000;
const SEEK_EVERY_MAX = 5000;
const ACK_WAIT = 5000;
const UNSERVED_MAX = 13_000; // longer than a redelivery takes: what a worker had is gone from the queue
export const QUEUE_DEADLINE = 300_000;
export const GENERATION = 600_000;
const DEATHS_MAX = 4;

export const newId = () => randomBytes(16).toString("hex");

/** An error of docs/errors.md, known by its `code`. */
export class HeadraceError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

/** One request: an async iterable of tokens {text, index, id}; `result` is there once it is complete. */
export class Stream {
  constructor(requester, request, deadline) {
    this.requester = requester;
    this.request = request;
    this.rid = request.rid;
    this.ids = []; // all that was delivered: what a worker has to go on from
    this.sid = ""; // of the latest attach: frames of any other are not ours
    this.claim = null; // adopted: whose frames are taken
    this.worker = null; // none: SEEK, else STREAM
    this.claims = new Set();
    this.served = new Set(); // workers that answered since the last token
    this.dead = new Set(); // those of them that then had no responders
    this.seq = null; // of the message, as far as is known
    this.held = null; // the message that a worker had last
    this.copies = 0;
    this.publishing = true;
    this.heard = this.seekSince = Date.now();
    this.attached = null; // when the attach was sent that is not answered yet
    this.seekAt = Infinity; // a publisher whose request no worker had yet only waits
    this.seekRound = 0;
    this.deadline = deadline; // to be accepted, and from then on to be complete
    this.finish = null;
    this.result = null;
    this.error = null;
    this.ended = false;
    this.unread = [];
    this.wake = () => {};
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        while (this.unread.length) yield this.unread.shift();
        if (this.error) throw this.error;
        if (this.ended) return;
        await new Promise((resolve) => (this.wake = resolve));
      }
    } finally {
      this.cancel(); // whoever leaves the loop needs it no more
    }
  }

  cancel() {
    if (!this.ended) this.end(new HeadraceError("cancelled", "the request was cancelled"));
  }

  end(error) {
    this.ended = true;
    this.error = error;
    if (this.worker) this.requester.release(this.worker, this.rid, this.sid, true);
    this.requester.streams.delete(this.rid);
    this.wake();
  }

  // -- what workers say -------------------------------------------------------------------------------------------------

  accepted(worker, claim, seq) {
    if (this.worker && this.worker !== worker) this.requester.release(this.worker, this.rid, this.sid, false);
    this.adopt(worker, claim);
    this.seq = this.held = seq;
    this.attach();
  }

  ok(worker, claim, sid, seq) {
    if (!this.isMine(worker, claim, sid)) return;
    this.adopt(worker, claim);
    this.seq = this.held = seq;
    this.answered(worker);
  }

  frame(worker, [, , claim, sid, choice, index, ids, text, , finish, usage, error]) {
    if (!this.isMine(worker, claim, sid)) return;
    this.adopt(worker, claim);
    this.answered(worker);
    if (error) return this.end(new HeadraceError(error[0], error[1]));
    if (choice !== 0) return;
    if (index > this.ids.length) return this.attach(); // a gap
    for (let at = this.ids.length - index; at < ids.length; at++) {
      this.unread.push({ text: text[at], index: this.ids.length, id: ids[at] });
      this.ids.push(ids[at]);
      this.served = new Set([worker]);
      this.dead.clear();
    }
    if (finish) this.finish = finish;
    if (this.finish && usage) {
      const [promptTokens, completionTokens] = usage;
      this.result = { rid: this.rid, finish: this.finish, promptTokens, completionTokens, claims: this.claims.size };
      return this.end(null);
    }
    this.wake();
  }

  wait(worker, sid) {
    if (sid !== this.sid) return;
    this.heard = Date.now();
    if (worker === this.worker) this.attached = null;
  }

  no(worker, sid) {
    this.served.delete(worker);
    this.dead.delete(worker);
    if (worker === this.worker && sid === this.sid) this.seek();
  }

  noResponders(worker, now) {
    if (now < this.requester.holdUntil) {
      if (worker !== this.worker) return; // it proves nothing: ask again when the time is over
      this.attached = null;
      this.heard = Math.min(now, this.requester.holdUntil - SILENCE);
      return;
    }
    if (this.served.has(worker)) this.dead.add(worker);
    if (this.dead.size >= DEATHS_MAX) return this.end(new HeadraceError("request_poisoned", "the request ended four workers"));
    if (worker === this.worker) this.seek();
  }

  // -- state ------------------------------------------------------------------------------------------------------------

  /** The whole fence: our latest sid, from the claim that was adopted. Another claim is told that it is not ours. */
  isMine(worker, claim, sid) {
    if (sid === this.sid && (this.claim === null || this.claim === claim)) return true;
    if (claim !== this.claim) this.requester.release(worker, this.rid, sid, false);
    return false;
  }

  adopt(worker, claim) {
    if (!this.claims.size) this.deadline = Date.now() + GENERATION;
    this.claims.add(claim);
    this.claim = claim;
    this.worker = worker;
    this.seekRound = 0;
  }

  answered(worker) {
    this.heard = Date.now();
    this.attached = null;
    this.served.add(worker);
  }

  attachItem() {
    this.sid = newId();
    return ["t", this.rid, this.sid, this.requester.address, [this.ids], null, null, this.dead.size];
  }

  attach() {
    this.attached = Date.now();
    this.requester.tell(this.worker, this.attachItem());
  }

  seek() {
    this.worker = this.claim = this.attached = null;
    this.sid = newId();
    this.seekSince = Date.now();
    this.seekRound = 0;
    this.seekAt = this.seekSince + SEEK_EVERY;
  }

  /** Our own connection was lost and is back: an accepted may have been lost, and with it the claim. */
  reconnected() {
    this.seekAt = Math.min(this.seekAt, Date.now() + ACK_WAIT);
  }

  tick(now) {
    if (now >= this.deadline) {
      this.end(new HeadraceError(this.claims.size ? "generation_deadline" : "queue_deadline", "the time is over"));
    } else if (!this.worker && now >= this.seekAt) {
      this.requester.broadcast(this.request, this.attachItem());
      if (this.seq === this.held && now - this.seekSince > UNSERVED_MAX && !this.publishing) this.requester.publishAgain(this);
      this.seekAt = now + Math.min(SEEK_EVERY * 2 ** this.seekRound++, SEEK_EVERY_MAX);
    } else if (this.worker && this.attached === null && now - this.heard >= SILENCE) {
      this.attach();
    } else if (this.worker && this.attached !== null && now - this.attached >= ATTACH_TIMEOUT) {
      const { sid } = this;
      this.seek();
      this.sid = sid; // if it answers after all, it is taken back
    }
  }
}
