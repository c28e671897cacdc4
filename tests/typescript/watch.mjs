// A TypeScript client that prints the notifications it receives, for tests/end_to_end/test_typescript.py.
//
//     node watch.mjs CLIENT TARGET
//
// CLIENT is "sdk" (1.x, legacy), "client" (2.x, modern) or "client-legacy" (2.x, held to the handshake). TARGET is JSON:
// {url} of a server, or {command, args, env} of one to start. The client fetches a list by itself when it is notified of
// a change, by its listChanged option.
//
// The output is lines of JSON: `connected`, then `received` for each notification, unchanged; `listed` for each fetched
// list; `updated` for the arguments of the typed handler of resources/updated, with the content that was then read;
// `closed` for each stream that ended, and how; and one `answer` for each input line: a method of `verbs` below and its
// argument.

import { createInterface } from 'node:readline';

const DEBOUNCE = 10; // ms; the default of 300 would only make the tests slow

const CLIENTS = {
  sdk: async () => ({
    ...(await import('@modelcontextprotocol/sdk/client/index.js')),
    ...(await import('@modelcontextprotocol/sdk/client/streamableHttp.js')),
    ...(await import('@modelcontextprotocol/sdk/client/stdio.js')),
    resourceUpdated: (await import('@modelcontextprotocol/sdk/types.js')).ResourceUpdatedNotificationSchema,
  }),
  client: async () => ({
    ...(await import('@modelcontextprotocol/client')),
    ...(await import('@modelcontextprotocol/client/stdio')),
    resourceUpdated: 'notifications/resources/updated',
    options: { versionNegotiation: { mode: 'auto' } },
  }),
  'client-legacy': async () => ({ ...(await CLIENTS.client()), options: { versionNegotiation: { mode: 'legacy' } } }),
};

const say = (event, fields) => process.stdout.write(JSON.stringify({ event, ...fields }) + '\n');

const [name, target] = process.argv.slice(2);
const { url, ...command } = JSON.parse(target);
const { Client, StreamableHTTPClientTransport, StdioClientTransport, resourceUpdated, options } = await CLIENTS[name]();

const refreshed = feature => ({
  debounceMs: DEBOUNCE,
  onChanged: (error, items) => say('listed', error ? { feature, error: String(error) } : { feature, items }),
});
const client = new Client(
  { name: 'watch', version: '1' },
  {
    ...options,
    listChanged: { tools: refreshed('tools'), prompts: refreshed('prompts'), resources: refreshed('resources') },
  },
);
client.onerror = error => say('error', { text: String(error) });
client.setNotificationHandler(resourceUpdated, async ({ params }) => {
  const contents = await client.readResource({ uri: params.uri }).then(result => result.contents, () => null);
  say('updated', { uri: params.uri, meta: params._meta, contents });
});

const transport = url ? new StreamableHTTPClientTransport(new URL(url)) : new StdioClientTransport(command);
// Set before the client adds its own handler, which calls this one first: it gets the message before a schema changes it.
transport.onmessage = message => {
  if (message.method?.startsWith('notifications/')) say('received', message);
};
await client.connect(transport);

const streams = {};
const follow = (stream, label) => stream?.closed.then(how => say('closed', { stream: label, how }));
const isModern = client.getProtocolEra?.() === 'modern';
if (isModern) follow(client.autoOpenedSubscription, 'lists');

const verbs = {
  change: async step => JSON.parse((await client.callTool({ name: 'change', arguments: step })).content[0].text),
  subscribe: async uris => {
    if (!isModern) {
      for (const uri of uris) await client.subscribeResource({ uri });
      return uris;
    }
    const stream = await client.listen({ resourceSubscriptions: uris });
    follow(stream, uris[0]);
    streams[uris[0]] = stream;
    return stream.honoredFilter.resourceSubscriptions;
  },
  unsubscribe: async uri => (isModern ? await streams[uri].close() : await client.unsubscribeResource({ uri })),
};

say('connected', {
  version: isModern ? client.getNegotiatedProtocolVersion?.() : transport.protocolVersion,
  capabilities: client.getServerCapabilities(),
  honoured: client.autoOpenedSubscription?.honoredFilter,
});

for await (const line of createInterface({ input: process.stdin })) {
  const [verb, argument] = JSON.parse(line);
  try {
    say('answer', { result: (await verbs[verb](argument)) ?? null });
  } catch (error) {
    say('answer', { error: String(error) });
  }
}
await client.close();
