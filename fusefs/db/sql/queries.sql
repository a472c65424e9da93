-- The statements of the file system itself, prepared by the mount. Each block is a name, a line on what
-- it does, and one statement. $1 is the tenant and $2 the agent wherever a statement has them.

-- name: load_directory
-- All entries of one directory, and its own row, which proves that it is still the one that was meant. A
-- symlink brings its target along.
select id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns,
  (extract(epoch from updated_at) * 1000000)::bigint * 1000 as ctime_ns, updated_session,
  case when kind = 'symlink' then content end as target,
  case when kind = 'symlink' then content_bytes end as target_bytes
from agent_files where tenant_id = $1::uuid and agent_id = $2::uuid and parent = $3
union all
select id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns,
  (extract(epoch from updated_at) * 1000000)::bigint * 1000, updated_session, null, null
from agent_files where tenant_id = $1::uuid and agent_id = $2::uuid and path = $3;

-- name: load_directories
-- Several directories, each as by load_directory, by the path $3 of each; those of $4 with $5 entries at most, or cut there.
select d.path as directory, f.*
from unnest(array[$3::text] || $4::text[]) with ordinality as d (path, number) cross join lateral (
  (select id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns,
    (extract(epoch from updated_at) * 1000000)::bigint * 1000 as ctime_ns, updated_session,
    case when kind = 'symlink' then content end as target,
    case when kind = 'symlink' then content_bytes end as target_bytes
  from agent_files where tenant_id = $1::uuid and agent_id = $2::uuid and parent = d.path
  limit case when d.number > 1 then $5::int end)
  union all
  select id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns,
    (extract(epoch from updated_at) * 1000000)::bigint * 1000, updated_session, null, null
  from agent_files where tenant_id = $1::uuid and agent_id = $2::uuid and path = d.path
) f;

-- name: fetch_node
-- One row's metadata by path.
select id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns,
  (extract(epoch from updated_at) * 1000000)::bigint * 1000 as ctime_ns, updated_session
from agent_files where tenant_id = $1::uuid and agent_id = $2::uuid and path = $3;

-- name: fetch_file
-- One row by path, with its content.
select id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns,
  (extract(epoch from updated_at) * 1000000)::bigint * 1000 as ctime_ns, updated_session, content, content_bytes
from agent_files where tenant_id = $1::uuid and agent_id = $2::uuid and path = $3;

-- name: fetch_links
-- Those of some paths that are symlinks, with their targets, the shortest first.
select f.path, f.content, f.content_bytes
from unnest($3::text[]) as wanted (path)
cross join lateral (select path, content, content_bytes, kind from agent_files
  where tenant_id = $1::uuid and agent_id = $2::uuid and path = wanted.path limit 1) as f
where f.kind = 'symlink' order by f.path;

-- name: fetch_contents
-- Contents by lineage, at their newest versions. One look-up by the primary key for each (`limit` keeps the planner from
-- joining, before the first ANALYZE, with the whole tenant).
select f.id, f.version, f.content, f.content_bytes
from unnest($3::uuid[]) as wanted (id)
cross join lateral (select id, version, content, content_bytes from agent_files
  where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and id = wanted.id limit 1) as f;

-- name: fetch_state
-- Where a lineage is now, for the text of a refusal.
select path, version, size_bytes, updated_session
from agent_files where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and id = $3::uuid;

-- name: commit_create
-- A new file with its content. No row: the name exists.
insert into agent_files (tenant_id, agent_id, id, path, content, content_bytes, kind, ino, mode, uid, gid, mtime_ns,
  updated_by, updated_session, write_id, write_handle)
values ($1::uuid, $2::uuid, $3::uuid, $4, coalesce($5::text, ''), $6::bytea, $7::text, $8::bigint, $9::int, $10::bigint,
  $11::bigint, $12::bigint, $13, $14, $15::uuid, $16::bigint)
on conflict (tenant_id, agent_id, path) do nothing
returning id, version, size_bytes, mtime_ns, (extract(epoch from updated_at) * 1000000)::bigint * 1000;

-- name: commit_revive
-- A new file that goes on with the lineage deleted at its path a moment ago. No row: the name exists.
insert into agent_files (tenant_id, agent_id, id, path, content, content_bytes, kind, ino, mode, uid, gid, mtime_ns,
  updated_by, updated_session, write_id, write_handle, version)
select $1::uuid, $2::uuid, $3::uuid, $4, coalesce($5::text, ''), $6::bytea, $7::text, $8::bigint, $9::int, $10::bigint,
  $11::bigint, $12::bigint, $13, $14, $15::uuid, $16::bigint,
  1 + coalesce((select max(version) from agent_file_versions
      where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and file_id = $3::uuid), 0)
on conflict do nothing
returning id, version, size_bytes, mtime_ns, (extract(epoch from updated_at) * 1000000)::bigint * 1000;

-- name: commit_write
-- New content for a lineage that is still at the expected version, and at path $16 where that is given. No row: it is not.
update agent_files set content = coalesce($5::text, ''), content_bytes = $6::bytea,
  mtime_ns = $7::bigint, mode = coalesce($8::int, mode), uid = coalesce($9::bigint, uid), gid = coalesce($10::bigint, gid),
  updated_at = clock_timestamp(), updated_by = $11, updated_session = $12, write_id = $13::uuid, write_op = $14,
  write_handle = $15::bigint
where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and id = $3::uuid and version = $4::int and kind = 'file'
  and ($16::text is null or path = $16)
returning id, version, size_bytes, mtime_ns, (extract(epoch from updated_at) * 1000000)::bigint * 1000;

-- name: commit_append
-- Add bytes to the end, whatever the version. $4 the bytes, $5 the same as text or null when they are not
-- text, $6 the largest size allowed. No row: it is gone, or it would be too large.
update agent_files set
  content = case when content_bytes is null and $5::text is not null then content || $5::text else '' end,
  content_bytes = case when content_bytes is null and $5::text is not null then null
    else coalesce(content_bytes, convert_to(content, 'UTF8')) || $4::bytea end,
  mtime_ns = $7::bigint, mode = coalesce($8::int, mode), uid = coalesce($9::bigint, uid), gid = coalesce($10::bigint, gid),
  updated_at = clock_timestamp(), updated_by = $11, updated_session = $12, write_id = $13::uuid, write_op = 'append',
  write_handle = $14::bigint
where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and id = $3::uuid and kind = 'file'
  and size_bytes + octet_length($4::bytea) <= $6::int
returning id, version, size_bytes, mtime_ns, (extract(epoch from updated_at) * 1000000)::bigint * 1000;

-- name: claim_name
-- Take a name at once: O_EXCL, mkdir. No row: it exists. Visible and announced when it returns, but not durable until
-- close: a crash of the server may forget an empty file, as one of a local disk may before fsync.
insert into agent_files (tenant_id, agent_id, id, path, content, kind, ino, mode, uid, gid, mtime_ns, updated_by,
  updated_session, write_id, write_handle, write_op, version)
values ($1::uuid, $2::uuid, $3::uuid, $4, '', $5::text, $6::bigint, $7::int, $8::bigint, $9::bigint, $10::bigint, $11, $12,
  $13::uuid, $14::bigint, case set_config('synchronous_commit', 'off', true) || $5::text when 'offfile' then 'claim' else 'create' end,
  case $5::text when 'file' then 0 else 1 end)
on conflict do nothing
returning id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns,
  (extract(epoch from updated_at) * 1000000)::bigint * 1000 as ctime_ns, updated_session;

-- name: claim_revived
-- The same, going on with the lineage $3 that was deleted there.
insert into agent_files (tenant_id, agent_id, id, path, content, kind, ino, mode, uid, gid, mtime_ns, updated_by,
  updated_session, write_id, write_handle, write_op, version)
values ($1::uuid, $2::uuid, $3::uuid, $4, '', $5::text, $6::bigint, $7::int, $8::bigint, $9::bigint, $10::bigint, $11, $12,
  $13::uuid, $14::bigint, case set_config('synchronous_commit', 'off', true) || $5::text when 'offfile' then 'claim' else 'create' end,
  coalesce((select max(version) from agent_file_versions
    where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and file_id = $3::uuid), 0))
on conflict do nothing
returning id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns,
  (extract(epoch from updated_at) * 1000000)::bigint * 1000 as ctime_ns, updated_session;

-- name: nobody_claims_late
-- Whether no mount claims names of an agent late, until the transaction ends: see fusefs_follow_v1.
select pg_try_advisory_xact_lock(uuid_hash_extended($2::uuid, 3)) from agent_namespaces
where tenant_id = $1::uuid and agent_id = $2::uuid;

-- name: delete_node
-- Delete one lineage, at the path where the caller knows it; the trigger keeps its content in the history, with who, which
-- session and write_id $7 of the settings. No row: it is not at that path.
delete from agent_files
where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and id = $3::uuid and path = $4
  and set_config('fusefs.by', $5, true) || set_config('fusefs.session', $6, true)
    || set_config('fusefs.delete_id', $7::uuid::text, true) is not null
returning version + 1, size_bytes;

-- name: rename_node
-- rename(2): see fusefs_rename_v1.
select * from fusefs_rename_v1($1::uuid, $2::uuid, $3::uuid, $4, $5, $6::uuid, $7::int, $8, $9, $10, $11::uuid, $12::int,
  $13::int);

-- name: set_attrs
-- Mode, owner and mtime of rows by id. No row: it is gone.
select id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns, ctime_ns, updated_session, locked
from fusefs_set_attrs_v1($1::uuid, $2::uuid, $3::uuid[], $4::int[], $5::bigint[], $6::bigint[], $7::bigint[], $8::boolean);

-- name: touch_directories
-- Raise the mtime of directories whose entries changed; never lowers one.
select fusefs_touch_v1($1::uuid, $2::uuid, $3::uuid[], $4::bigint[]);

-- name: set_root_attrs
-- The same for the root, which has no row of its own.
update agent_namespaces set root_mode = coalesce($3::int, root_mode), root_uid = coalesce($4::bigint, root_uid),
  root_gid = coalesce($5::bigint, root_gid), root_mtime_ns = coalesce($6::bigint, root_mtime_ns)
where tenant_id = $1::uuid and agent_id = $2::uuid;

-- name: find_write
-- Whether a change was applied, by its write_id.
select file_id, version, size_bytes, (extract(epoch from at) * 1000000)::bigint * 1000
from agent_file_versions where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and write_id = $3::uuid;

-- name: find_claim
-- Whether a claim was applied, by its write_id.
select id, path, kind, ino, version, size_bytes, mode, uid, gid, mtime_ns,
  (extract(epoch from updated_at) * 1000000)::bigint * 1000 as ctime_ns, updated_session
from agent_files where tenant_id = $1::uuid and agent_id is not distinct from $2::uuid and id = $3::uuid and write_id = $4::uuid;

-- name: reserve_inos
-- Numbers for incarnations that this daemon will make.
select nextval('fusefs_ino') from generate_series(1, $1::int);

-- name: open_namespace
-- What a mount must know of a namespace, made on first use.
with made as (
  insert into agent_namespaces (tenant_id, agent_id)
    select tenant_id, id from agents where tenant_id = $1::uuid and id = $2::uuid
    on conflict (tenant_id, agent_id) do update set root_mode = agent_namespaces.root_mode
  returning channel, quota_bytes, root_mode, root_uid, root_gid, root_mtime_ns)
select channel, quota_bytes, root_mode, root_uid, root_gid, root_mtime_ns from made;

-- name: measure_usage
-- Files and bytes of a namespace.
select count(*), coalesce(sum(size_bytes), 0)::bigint
from agent_files where tenant_id = $1::uuid and agent_id = $2::uuid;

-- name: fetch_quota
-- The quota of a namespace, null for none, and what is used of it.
select quota_bytes, used_bytes from agent_namespaces where tenant_id = $1::uuid and agent_id = $2::uuid;

-- name: open_session
-- Note that a session is open; says when it began and whether it was known before.
insert into agent_sessions as s (tenant_id, agent_id, session, principal) values ($1::uuid, $2::uuid, $3, $4)
on conflict (tenant_id, agent_id, session) do update set ended_at = null
returning (extract(epoch from created_at) * 1000000)::bigint * 1000, xmax <> 0 as known;

-- name: list_sessions
-- The sessions of an agent that have not ended.
select session from agent_sessions where tenant_id = $1::uuid and agent_id = $2::uuid and ended_at is null
order by session;

-- name: end_session
-- Note that a session's mount has gone.
update agent_sessions set ended_at = now() where tenant_id = $1::uuid and agent_id = $2::uuid and session = $3;

-- name: record_conflict
-- Keep the bytes of a lost race.
insert into agent_file_conflicts (tenant_id, agent_id, id, file_id, path, expected_version, actual_version, op,
  content, session, principal)
values ($1::uuid, $2::uuid, $3::uuid, $4::uuid, $5, $6::int, $7::int, $8, $9::bytea, $10, $11)
on conflict (tenant_id, id) do nothing;
