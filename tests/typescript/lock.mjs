// Removes the addresses of sponsors, the last ones, from package-lock.json. `npm run lock` calls it.

import { readFileSync, writeFileSync } from 'node:fs';

const FILE = new URL('package-lock.json', import.meta.url);
const lock = JSON.parse(readFileSync(FILE, 'utf8'));
for (const entry of Object.values(lock.packages)) delete entry.funding;
const text = JSON.stringify(lock, null, 2) + '\n';
if (text.includes('://')) throw new Error('package-lock.json names an address');
writeFileSync(FILE, text);
