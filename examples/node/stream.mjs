// Stream one prompt from a gateway: npm install && node stream.mjs "Once upon a time"
// Options: --address host:port, --model name (default: the only one served), --max-tokens n, --raw.

import { parseArgs } from "node:util";
import { fileURLToPath } from "node:url";
import { dirname, join } from "node:path";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    address: { type: "string", default: "127.0.0.1:50051" },
    model: { type: "string" },
    "max-tokens": { type: "string", default: "64" },
    raw: { type: "boolean", default: false },
  },
});
const prompt = positionals[0] ?? "What is the capital of France?";

const protos = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "protos");
const definition = protoLoader.loadSync("inferfleet/v1/inference.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String, // seeds have 64 bits
  enums: String,
  defaults: true, // 0 is not sent: without this a count of 0 reads as undefined
  oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).inferfleet.v1;
const client = new Inference(values.address, grpc.credentials.createInsecure(), {
  "grpc.max_receive_message_length": 16 * 1024 * 1024,
});

function onlyModel() {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + 10_000;
    client.ListModels({}, { deadline }, (error, answer) => {
      if (error) return reject(error);
      if (answer.models.length === 1) return resolve(answer.models[0].name);
      const names = answer.models.map((model) => model.name).join(", ") || "none";
      reject(new Error(`say which --model: ${values.address} serves ${names}`));
    });
  });
}

function stream(request) {
  return new Promise((resolve, reject) => {
    const call = client.Generate(request);
    call.on("data", (message) => {
      if (message.event === "started") {
        console.error(`[${message.started.model} on ${message.started.engine_id}]`);
      } else if (message.event === "delta" && message.delta.content === "text") {
        process.stdout.write(message.delta.text);
      } else if (message.event === "finished") {
        const reason = message.finished.reason.replace("FINISH_REASON_", "");
        console.error(`\n[${reason}]`);
      } else if (message.event === "summary") {
        const { prompt_tokens, cached_tokens, completion_tokens } = message.summary.usage;
        console.error(`[${prompt_tokens} in (${cached_tokens} cached), ${completion_tokens} out]`);
      }
    });
    call.on("error", reject);
    call.on("end", resolve);
  });
}

try {
  const model = values.model ?? (await onlyModel());
  const chat = { messages: [{ role: "user", content: prompt }] };
  await stream({
    model,
    ...(values.raw ? { text: prompt } : { chat }),
    sampling: { temperature: 0 },
    stop: { max_tokens: Number(values["max-tokens"]) },
  });
} catch (error) {
  console.error(`${error.code === undefined ? "error" : grpc.status[error.code]}: ${error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
