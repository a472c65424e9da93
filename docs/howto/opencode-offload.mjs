// OpenCode plugin: long results of tools are stored, and the model gets a preview. Its place is .opencode/plugins/.
import { spawnSync } from "node:child_process"

// Reading a stored result must not store another.
const FILE_TOOLS = new Set(["read", "write", "edit", "multiedit", "patch", "list", "glob", "grep"])
// A preview has up to 999 characters: what is shorter is never stored.
const PREVIEW = 1000

export const FusefsOffload = async ({ directory }) => {
  const bounded = (text, callID) => {
    if (typeof text !== "string" || text.length < PREVIEW) return text
    const args = ["offload", "--tool-call-id", callID ?? "", "--dir", process.env.HANGO_FS_DIR ?? directory]
    const done = spawnSync("fusefs", args, { input: text, encoding: "utf8", maxBuffer: 64 * 1024 * 1024 })
    return done.status === 0 ? done.stdout : text
  }
  return {
    "tool.execute.after": async (input, output) => {
      if (FILE_TOOLS.has(input.tool)) return
      output.output = bounded(output.output, input.callID)
      // What an MCP server gave comes as it is.
      for (const block of output.content ?? []) block.text = bounded(block.text, input.callID)
    },
  }
}
