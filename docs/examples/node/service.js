// node service.js MODEL PROMPT: one request to the service of any ingress, with streamed replies. What is lost between it and
// us is lost (core NATS, at most once); the numbers tell of it.

import { headers } from "nats";
import { connectAsTenant, token } from "./names.js";
import { HeadraceError, newId } from "./stream.js";

const [model, input] = process.argv.slice(2);
const nc = await connectAsTenant();

const { tenant } = (await nc.request("headrace.whoami", "{}", { timeout: 30_000 })).json();
const address = `tok.${token(tenant)}.${newId()}`; // an address of our own: when nobody listens there, the request is cancelled
const replies = nc.subscribe(address);
const given = headers();
given.set("Hr-Reply", address);
nc.publish(`headrace.infer.${token(model)}`, JSON.stringify({ input, max_tokens: 64, temperature: 0, stream: true }), {
  headers: given,
  reply: address, // where it is told that there is no ingress
});

let expected = 0;
for await (const message of replies) {
  if (message.headers?.code === 503) throw new Error("no ingress is there");
  if (Number(message.headers.get("Hr-Event")) !== expected++) throw new Error("a reply was lost");
  if (message.headers.get("Hr-Keepalive")) continue;
  const event = message.json();
  if (event.error) throw new HeadraceError(event.error.code, event.error.message);
  process.stdout.write(event.token ?? "");
  if (message.headers.get("Hr-End")) {
    console.log(`\n${event.finish_reason}: ${event.usage.completion_tokens} tokens`);
    break;
  }
}
await nc.drain();
