-- What an administrator asks: tenants, agents, history, conflicts, checks, retention, usage. Times are
-- seconds since 1970. $1 is the tenant and $2 the agent wherever a statement has them.

-- name: list_tenants
-- Every tenant with its number of agents.
select t.id, t.slug, extract(epoch from t.created_at)::float8,
  (select count(*) from agents a where a.tenant_id = t.id)
from tenants t order by t.slug nulls last, t.id;

-- name: find_tenant
-- One tenant; $1 a UUID or null, $2 a slug, which counts only where there is no UUID: another program may let tenants
-- choose theirs, and one that reads as somebody else's UUID must not be found by it.
select t.id, t.slug, extract(epoch from t.created_at)::float8,
  (select count(*) from agents a where a.tenant_id = t.id)
from tenants t where t.id = $1::uuid or ($1::uuid is null and t.slug = $2);

-- name: insert_tenant
-- A new tenant. No row: the slug is taken.
insert into tenants (id, slug) values ($1::uuid, $2) on conflict do nothing
returning id, slug, extract(epoch from created_at)::float8, 0::bigint;

-- name: delete_tenant
-- A tenant with everything that it has.
delete from tenants where id = $1::uuid returning id;

-- name: list_agents
-- The agents of a tenant.
select tenant_id, id, slug, extract(epoch from created_at)::float8
from agents where tenant_id = $1::uuid order by slug nulls last, id;

-- name: find_agents
-- Agents of any tenant; $1 a tenant or null, $2 a UUID or null, $3 a slug, which counts only where there is no UUID.
select tenant_id, id, slug, extract(epoch from created_at)::float8
from agents where ($1::uuid is null or tenant_id = $1::uuid) and (id = $2::uuid or ($2::uuid is null and slug = $3));

-- name: insert_agent
-- A new agent. No row: the slug is taken.
insert into agents (tenant_id, id, slug) values ($1::uuid, $2::uuid, $3) on conflict do nothing
returning tenant_id, id, slug, extract(epoch from created_at)::float8;

-- name: delete_agent
-- An agent with its files, history, sessions and conflicts.
delete from agents where tenant_id = $1::uuid and id = $2::uuid returning id;

-- name: set_quotas
-- Quotas of a namespace in bytes; null leaves one alone, -1 removes it.
select fusefs_set_quotas_v1($1::uuid, $2::uuid, $3::bigint, $4::bigint);

-- name: measure_namespace
-- Files, bytes, kept bytes of the history, changes, conflicts and quotas of a namespace.
select f.files, f.bytes, h.bytes, h.changes, c.conflicts, n.quota_bytes, n.history_quota_bytes
from (select count(*) filter (where kind <> 'dir') as files, coalesce(sum(size_bytes), 0)::bigint as bytes
      from agent_files where tenant_id = $1::uuid and agent_id = $2::uuid) f,
     (select count(*) as changes,
        coalesce(sum(old_size) filter (where old_state in ('text', 'bytes')), 0)::bigint as bytes
      from agent_file_versions where tenant_id = $1::uuid and agent_id = $2::uuid) h,
     (select count(*) as conflicts from agent_file_conflicts where tenant_id = $1::uuid and agent_id = $2::uuid) c
left join agent_namespaces n on n.tenant_id = $1::uuid and n.agent_id = $2::uuid;

-- name: list_versions
-- The history of a path: every change made at it, and every change of the lineage that is at it now.
with lineages as (
  select id as file_id from agent_files where tenant_id = $1::uuid and agent_id = $2::uuid and path = $3
  union
  select file_id from agent_file_versions where tenant_id = $1::uuid and agent_id = $2::uuid and path = $3)
select v.file_id, v.version, v.seq, extract(epoch from v.at)::float8, v.op, v.kind, v.path, v.old_path, v.size_bytes,
  v.mode, v.updated_by, v.updated_session, v.old_state, v.old_size, f.version, f.path
from agent_file_versions v join lineages using (file_id)
left join agent_files f on f.tenant_id = v.tenant_id and f.id = v.file_id
where v.tenant_id = $1::uuid and v.agent_id = $2::uuid
order by v.at desc, v.seq desc;

-- name: find_unseen_version
-- Whether others changed a lineage ($3) after $6 (ns since 1970), up to version $4, and session $5 did not write it since:
-- an append does not show what it was appended to, nor a rename what it moved there.
with content as (
  select version, op, updated_session, at from agent_file_versions
    where tenant_id = $1::uuid and agent_id = $2::uuid and file_id = $3::uuid and version <= $4::int
      and (op in ('create', 'write', 'append', 'restore') or op = 'rename' and old_state <> 'none'))
select exists (select from content c where c.updated_session <> $5
  and c.at > to_timestamp($6::bigint / 1000000000.0)
  and c.version > coalesce((select max(version) from content where updated_session = $5 and op not in ('append', 'rename')), 0));

-- name: list_deleted
-- The newest deletion of each path below $3 (with its slash; '/' for all) that does not exist now.
select distinct on (v.path) v.path, v.file_id, v.version - 1, v.old_size, extract(epoch from v.at)::float8,
  v.updated_by, v.updated_session, v.old_state
from agent_file_versions v
where v.tenant_id = $1::uuid and v.agent_id = $2::uuid and v.op = 'delete' and v.kind <> 'dir'
  and v.path >= $3 and v.path < left($3, -1) || '0'
  and not exists (select from agent_files f
    where f.tenant_id = v.tenant_id and f.agent_id = v.agent_id and f.path = v.path)
order by v.path, v.at desc, v.seq desc;

-- name: fetch_superseded
-- The superseded content that a version's row holds.
select old_content, old_bytes from agent_file_versions
where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and file_id = $3::uuid and version = $4::int
  and old_state in ('text', 'bytes');

-- name: list_conflicts
-- Lost races whose bytes are kept, the newest first; $3 a path or null.
select id, file_id, path, expected_version, actual_version, op, octet_length(content), session, principal,
  extract(epoch from at)::float8
from agent_file_conflicts where tenant_id = $1::uuid and agent_id = $2::uuid and ($3::text is null or path = $3)
order by at desc, id;

-- name: fetch_conflict
-- One lost race with its bytes.
select id, file_id, path, expected_version, actual_version, op, octet_length(content), session, principal,
  extract(epoch from at)::float8, content
from agent_file_conflicts where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and id = $3::uuid;

-- name: delete_conflict
-- Forget the bytes of a lost race.
delete from agent_file_conflicts where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and id = $3::uuid returning id;

-- name: list_nodes
-- Every row of a namespace without its content, parents before what is in them.
select id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns,
  (extract(epoch from updated_at) * 1000000)::bigint * 1000, updated_session
from agent_files where tenant_id = $1::uuid and agent_id = $2::uuid order by path;

-- name: fetch_nodes
-- Rows by lineage with their contents, parents before what is in them.
select f.*
from unnest($3::uuid[]) as wanted (id)
cross join lateral (select id, path, kind, mode, uid, gid, mtime_ns, content, content_bytes from agent_files
  where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and id = wanted.id limit 1) as f
order by f.path;

-- name: measure_expired_versions
-- Superseded contents older than $3 seconds: how many and how many bytes.
select count(*), coalesce(sum(old_size) filter (where old_state in ('text', 'bytes')), 0)::bigint
from agent_file_versions where tenant_id = $1::uuid and agent_id = $2::uuid
  and old_state in ('text', 'bytes', 'prefix') and at < now() - make_interval(secs => $3::float8);

-- name: measure_over_quota
-- Superseded contents that the quota of the history has no room for: how many, how many bytes, and the last of them
-- in the order of changes. The newest get the room, so whatever a kept append's row needs is kept too. $3 seconds:
-- older ones do not count, they expire anyway; null: all count. $4 sizes of contents that are about to come, in order.
with counted as (
  select false as coming, seq, case when old_state = 'prefix' then 0 else old_size end as bytes
  from agent_file_versions
  where tenant_id = $1::uuid and agent_id = $2::uuid and old_state in ('text', 'bytes', 'prefix')
    and ($3::float8 is null or at >= now() - make_interval(secs => $3::float8))
  union all
  select true, number, size from unnest($4::bigint[]) with ordinality as contents (size, number)),
summed as (
  select coming, seq, bytes, sum(bytes) over (order by coming desc, seq desc rows unbounded preceding) as total
  from counted)
select count(*), coalesce(sum(bytes), 0)::bigint, max(seq) filter (where not coming)
from summed join agent_namespaces n on n.tenant_id = $1::uuid and n.agent_id = $2::uuid
where total > n.history_quota_bytes;

-- name: drop_superseded
-- Drop the oldest superseded contents, at most $5 of those older than $3 seconds (null: none) or not after $4 in the
-- order of changes (null: none); the rows stay. Oldest first, since an append's row needs the content of the next
-- version.
with expired as (
  select tenant_id, file_id, version, seq, old_size, old_state from agent_file_versions
  where tenant_id = $1::uuid and agent_id = $2::uuid and old_state in ('text', 'bytes', 'prefix')
    and (at < now() - make_interval(secs => $3::float8) or seq <= $4::bigint)
  order by seq limit $5::int for update skip locked),
dropped as (
  update agent_file_versions v set old_state = 'dropped', old_content = null, old_bytes = null
  from expired e
  where v.tenant_id = e.tenant_id and v.file_id = e.file_id and v.version = e.version and v.seq = e.seq
    and v.tenant_id = $1::uuid and v.agent_id = $2::uuid
  returning case when e.old_state = 'prefix' then 0 else e.old_size end as bytes)
select count(*), coalesce(sum(bytes), 0)::bigint from dropped;

-- name: list_expired_results
-- Large tool results of sessions that ended more than $3 seconds ago: deepest paths first, so that a
-- directory comes after what is in it.
select f.id, f.path, f.kind, f.size_bytes
from agent_sessions s
join agent_files f on f.tenant_id = s.tenant_id and f.agent_id = s.agent_id
  and (f.path = '/large_tool_results/' || s.session
    or (f.path >= '/large_tool_results/' || s.session || '/' and f.path < '/large_tool_results/' || s.session || '0'))
where s.tenant_id = $1::uuid and s.agent_id = $2::uuid and s.ended_at < now() - make_interval(secs => $3::float8)
order by f.path desc;

-- name: check_parents
-- Rows whose parent is missing, no directory, or not what their path says.
select f.path, case when f.parent <> fusefs_parent_v1(f.path) then 'it is listed in ' || f.parent
  when p.id is null then 'its directory does not exist' else 'its parent is a ' || p.kind end
from agent_files f
left join agent_files p on p.tenant_id = f.tenant_id and p.agent_id = f.agent_id and p.path = f.parent
where f.tenant_id = $1::uuid and f.agent_id = $2::uuid
  and (f.parent <> fusefs_parent_v1(f.path) or (f.parent <> '/' and p.kind is distinct from 'dir'))
order by f.path limit 100;

-- name: check_paths
-- Paths that are not absolute and normalised, and names that the file system keeps for itself.
select path, 'the path is not valid' from agent_files
where tenant_id = $1::uuid and agent_id = $2::uuid
  and (left(path, 1) <> '/' or right(path, 1) = '/' or strpos(path, '//') > 0 or strpos(path || '/', '/./') > 0
    or strpos(path || '/', '/../') > 0 or path = '/.fusefs' or (path >= '/.fusefs/' and path < '/.fusefs0'))
order by path limit 100;

-- name: check_sizes
-- Rows whose size is not that of their content, or that hold two contents.
select path, case when content_bytes is not null and content <> '' then 'it has two contents'
  else 'the size is ' || size_bytes || ', the content has ' || case when content_bytes is null then octet_length(content) else octet_length(content_bytes) end
  end
from agent_files
where tenant_id = $1::uuid and agent_id = $2::uuid
  and (size_bytes <> case when content_bytes is null then octet_length(content) else octet_length(content_bytes) end
    or (content_bytes is not null and content <> ''))
order by path limit 100;

-- name: check_usage
-- Namespaces with a quota whose use is not what their files have.
select '/', 'it is charged with ' || n.used_bytes || ' bytes, its files have ' || coalesce(sum(f.size_bytes), 0)
from agent_namespaces n left join agent_files f on f.tenant_id = n.tenant_id and f.agent_id = n.agent_id
where n.tenant_id = $1::uuid and n.agent_id = $2::uuid and n.quota_bytes is not null
group by n.used_bytes having n.used_bytes <> coalesce(sum(f.size_bytes), 0);

-- name: check_kinds
-- Directories, FIFOs and sockets with content.
select path, 'a ' || kind || ' has content' from agent_files
where tenant_id = $1::uuid and agent_id = $2::uuid and kind in ('dir', 'fifo', 'socket') and size_bytes <> 0
order by path limit 100;

-- name: check_incarnations
-- Inode numbers that two rows share.
select min(path), 'it shares inode ' || ino || ' with ' || max(path) from agent_files
where tenant_id = $1::uuid and agent_id = $2::uuid
group by ino having count(*) > 1 order by 1 limit 100;

-- name: check_newest
-- Files whose newest history row is not that of their version.
select f.path, 'it is at version ' || f.version || ', its history at ' || coalesce(max(v.version)::text, 'none')
from agent_files f
left join agent_file_versions v on v.tenant_id = f.tenant_id and v.file_id = f.id
where f.tenant_id = $1::uuid and f.agent_id = $2::uuid and f.kind <> 'dir' and f.write_op <> 'claim'
group by f.id, f.path, f.version having max(v.version) is distinct from f.version
order by f.path limit 100;

-- name: check_density
-- Lineages whose versions have gaps.
select min(path), 'its history has ' || count(distinct version) || ' of the versions 1 to ' || max(version)
from agent_file_versions
where tenant_id = $1::uuid and agent_id = $2::uuid and kind <> 'dir'
group by file_id having count(distinct version) <> max(version) or min(version) <> 1
order by 1 limit 100;

-- name: check_history
-- History rows whose superseded content has not the size that it should have.
select path, 'version ' || version || ' superseded ' || old_size || ' bytes, ' || case
    when old_state = 'text' then coalesce(octet_length(old_content)::text, 'nothing')
    when old_state = 'bytes' then coalesce(octet_length(old_bytes)::text, 'nothing')
    else 'nothing' end || ' kept'
from agent_file_versions
where tenant_id = $1::uuid and agent_id = $2::uuid and case old_state
  when 'text' then octet_length(old_content) is distinct from old_size or old_bytes is not null
  when 'bytes' then octet_length(old_bytes) is distinct from old_size or old_content is not null
  else old_content is not null or old_bytes is not null end
order by path, version limit 100;

-- name: check_steps
-- History rows that supersede another size than the version before them made.
select path, 'version ' || version || ' superseded ' || old_size || ' bytes, version ' || (version - 1) || ' had '
  || before_size
from (select path, version, old_state, old_size, kind,
        lag(size_bytes) over (partition by file_id order by version) as before_size,
        lag(version) over (partition by file_id order by version) as before_version
      from agent_file_versions
      where tenant_id = $1::uuid and agent_id = $2::uuid and kind <> 'dir'
        and not (op = 'rename' and old_state = 'none')) v
where before_version = version - 1 and old_state <> 'none' and old_size <> before_size
order by path, version limit 100;
