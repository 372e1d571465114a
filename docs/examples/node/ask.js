// node ask.js MODEL PROMPT...: ask all at once, as a requester of its own; a line of JSON for each answer.

import { connectAsTenant } from "./names.js";
import { Requester } from "./requester.js";

const [model, ...prompts] = process.argv.slice(2);
const sampling = JSON.parse(process.env.SAMPLING ?? '{"max_tokens": 64, "temperature": 0}');
const requester = new Requester(await connectAsTenant());
await requester.start();

async function ask(prompt) {
  const stream = await requester.submit(model, prompt, sampling);
  const tokens = [];
  try {
    for await (const { text } of stream) tokens.push(text);
    console.log(JSON.stringify({ prompt, tokens, ...stream.result }));
  } catch (error) {
    console.log(JSON.stringify({ prompt, tokens, error: error.code ?? String(error) }));
    process.exitCode = 1;
  }
}

await Promise.all(prompts.map(ask));
await requester.close();
