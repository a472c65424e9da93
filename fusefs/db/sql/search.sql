-- What is searched for in a namespace: names by pattern, contents by text. $1 is the tenant and $2 the agent. A search
-- looks at the paths from $3 up to but without $4, and leaves out, below the roots named in $5, all names but those in
-- $6: a coarse form of what the session may know of. $7 is a regular expression for paths, null for all.

-- name: prepare_search
-- Limit the time in ms that each statement of this transaction may take; fails where $2 is no regular expression.
select set_config('statement_timeout', $1::text, true), ''::text ~ $2::text;

-- name: list_files
-- Files without their contents, by path; $8 at most.
select id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns,
  (extract(epoch from updated_at) * 1000000)::bigint * 1000 as ctime_ns, updated_session
from agent_files
where tenant_id = $1::uuid and agent_id = $2::uuid and kind = 'file' and path >= $3 and path < $4
  and (split_part(path, '/', 2) <> all ($5::text[]) or split_part(path, '/', 3) = any ($6::text[]))
  and ($7::text is null or path ~ $7::text)
order by path limit $8::int;

-- name: grep_text
-- Lines that hold the text $8, by path and number, after line $9 of path $3; $10 at most. Of a line over 500
-- characters 400 around the place are given, and at which character they begin.
select f.path, l.number::int,
  case when char_length(l.line) > 500 then substr(l.line, greatest(1, strpos(l.line, $8::text) - 100), 400) else l.line end,
  case when char_length(l.line) > 500 then greatest(1, strpos(l.line, $8::text) - 100) else 1 end, char_length(l.line)
from agent_files f cross join lateral fusefs_lines_v1(f.content) as l
where f.tenant_id = $1::uuid and f.agent_id = $2::uuid and f.kind = 'file' and f.path >= $3 and f.path < $4
  and (split_part(f.path, '/', 2) <> all ($5::text[]) or split_part(f.path, '/', 3) = any ($6::text[]))
  and ($7::text is null or f.path ~ $7::text)
  and strpos(f.content, $8::text) > 0 and strpos(l.line, $8::text) > 0
  and (l.number > $9::int or f.path > $3)
order by f.path, l.number limit $10::int;

-- name: grep_pattern
-- The same for the regular expression $8. $11 is one that matches the whole of each file with such a line: it spares the
-- splitting of the others. $12 is $8 in such a form that its first group is the place that matches.
select f.path, l.number::int,
  case when char_length(l.line) > 500 then substr(l.line, start, 400) else l.line end,
  case when char_length(l.line) > 500 then start else 1 end, char_length(l.line)
from agent_files f cross join lateral fusefs_lines_v1(f.content) as l
cross join lateral greatest(1, strpos(l.line, coalesce((regexp_match(l.line, $12::text))[1], '')) - 100) as start
where f.tenant_id = $1::uuid and f.agent_id = $2::uuid and f.kind = 'file' and f.path >= $3 and f.path < $4
  and (split_part(f.path, '/', 2) <> all ($5::text[]) or split_part(f.path, '/', 3) = any ($6::text[]))
  and ($7::text is null or f.path ~ $7::text)
  and replace(f.content, E'\r\n', E'\n') ~ $11::text and l.line ~ $8::text
  and (l.number > $9::int or f.path > $3)
order by f.path, l.number limit $10::int;
