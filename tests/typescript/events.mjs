// Subscribes to events of an MCP server with the Vercel AI SDK, and receives them with its webhook handler.
//
//     node events.mjs URL TOKEN NAME ARGUMENTS
//
// Prints one line of JSON for each event, and one for each step. A line on standard input renews the subscription; the
// end of standard input ends it.

import { createServer } from 'node:http';
import { createInterface } from 'node:readline';
import { Readable } from 'node:stream';

import { createMCPClient, experimental_createMCPEventWebhook as createMCPEventWebhook } from '@ai-sdk/mcp';

const [url, token, name, args] = process.argv.slice(2);
const print = line => console.log(JSON.stringify(line));

const subscriptions = new Map();
const store = {
  get: async key => subscriptions.get(key),
  getById: async id => [...subscriptions.values()].find(each => each.id === id),
  set: async subscription => void subscriptions.set(subscription.key, subscription),
  update: async (key, patch) => void subscriptions.set(key, { ...subscriptions.get(key), ...patch }),
  delete: async key => void subscriptions.delete(key),
};

const handle = createMCPEventWebhook({
  store,
  onEvent: async ({ subscription, event }) => print({ event, subscription: subscription.id }),
  onTerminated: async ({ termination }) => print({ terminated: termination.error }),
  onError: error => print({ error: String(error) }),
});

const server = createServer(async (request, response) => {
  const init = { method: request.method, headers: request.headers, body: Readable.toWeb(request), duplex: 'half' };
  const result = await handle(new Request(`http://127.0.0.1${request.url}`, init));
  response.writeHead(result.status, Object.fromEntries(result.headers));
  response.end(Buffer.from(await result.arrayBuffer()));
});
await new Promise(done => server.listen(0, '127.0.0.1', done));

const client = await createMCPClient({
  transport: { type: 'http', url, headers: { Authorization: `Bearer ${token}` } },
  experimental_events: { store },
});
const events = client.experimental_events;
print({ types: (await events.list()).events.map(each => each.name) });
const callback = `http://127.0.0.1:${server.address().port}/events`;
const delivery = { mode: 'webhook', url: callback, allowInsecureLocalhost: true };
const { id } = await events.subscribe({ name, arguments: JSON.parse(args), delivery });
print({ subscribed: id });
for await (const _ of createInterface({ input: process.stdin })) print({ renewed: (await events.refresh({ id })).id });
if (subscriptions.size) await events.unsubscribe({ id });
print({ left: subscriptions.size });
await client.close();
server.close();
