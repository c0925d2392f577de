// gzip, a schema, a tool and CORS over plain HTTP: node examples/node/http_session.mjs [base URL]
// Needs Node 18 or later and no package, and a gateway's HTTP address, e.g. from `inferfleet up`.
// The last step needs `inferfleet up --set gateway.cors_origins=https://chat.example.com`.

import { gzipSync } from "node:zlib";

const base = process.argv[2] ?? "http://127.0.0.1:8080";
const origin = process.argv[3] ?? "https://chat.example.com";
const url = `${base}/v1/chat/completions`;

const place = {
  type: "object",
  properties: { city: { enum: ["Paris", "London"] } },
  required: ["city"],
  additionalProperties: false,
};
const room = {
  type: "object",
  properties: { room: { enum: ["kitchen", "cellar"] } },
  required: ["room"],
  additionalProperties: false,
};

async function checked(response) {
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return response;
}

async function ask(model, content, fields = {}) {
  const messages = [{ role: "user", content }];
  const body = { model, messages, temperature: 0, max_tokens: 128, ...fields };
  const response = await fetch(url, {
    method: "POST",
    headers: { "Content-Type": "application/json", "Content-Encoding": "gzip" },
    body: gzipSync(JSON.stringify(body)),
  });
  return (await (await checked(response)).json()).choices[0].message;
}

// What a browser asks before a page of `origin` may call.
async function allowedOrigin() {
  const headers = {
    Origin: origin,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-type",
  };
  const response = await checked(await fetch(url, { method: "OPTIONS", headers }));
  return response.headers.get("access-control-allow-origin");
}

try {
  const model = (await (await checked(await fetch(`${base}/v1/models`))).json()).data[0].id;
  console.log("gzip:", (await ask(model, "What is the capital of France?")).content);
  const format = { type: "json_schema", json_schema: { name: "place", schema: place } };
  const answer = await ask(model, "Where is the Eiffel Tower?", { response_format: format });
  console.log("schema:", JSON.parse(answer.content).city);
  const message = await ask(model, "How warm is it in the kitchen?", {
    tools: [{ type: "function", function: { name: "read_temperature", parameters: room } }],
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  for (const { function: call } of message.tool_calls) {
    console.log("tool:", call.name, JSON.parse(call.arguments).room);
  }
  console.log("cors:", await allowedOrigin());
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
