-- The files of agents, their history, and what keeps both true.
--
-- Keys hold tenant_id so that Citus can distribute every table by it. `tenants` and `agents`
-- may belong to another program; only a slug is added to them. Paths compare by byte (collation "C").

do $$
begin
  -- The daemon's role: no login, no BYPASSRLS, not the owner, so that row-level security binds it. Who makes
  -- it becomes a member, so that a daemon with the owner's login steps down to it.
  if to_regrole('fusefs_daemon') is null then
    -- Roles are shared by all databases of a server: another migration may be making it right now.
    begin
      create role fusefs_daemon nologin noinherit;
      grant fusefs_daemon to current_user;
    exception when duplicate_object or unique_violation then null;
    end;
  end if;
end
$$;

create table if not exists tenants (
  id uuid primary key default gen_random_uuid(),
  created_at timestamptz not null default now()
);
alter table tenants add column if not exists slug text;
create unique index if not exists tenants_slug_idx on tenants (slug);

create table if not exists agents (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null references tenants (id) on delete cascade,
  created_at timestamptz not null default now()
);
alter table agents add column if not exists slug text;
create unique index if not exists agents_tenant_slug_idx on agents (tenant_id, slug);

-- One row per agent: what the file system must know of a namespace as a whole.
--   channel      the NOTIFY channel: 128 random bits, since LISTEN knows no row-level security
--   only_follower  the origin of the one program that follows the channel: its own changes are told to nobody; null: all
--                are told (fusefs_follow_v1)
--   quota_bytes  null: no quota; used_bytes is kept by trigger while there is one, and means nothing otherwise
--   root_*       mode, owner and mtime of the root directory, which has no row in agent_files;
--                root_uid and root_gid null: whoever mounts
create table agent_namespaces (
  tenant_id uuid not null references tenants (id) on delete cascade,
  agent_id uuid not null references agents (id) on delete cascade,
  channel text not null default 'fusefs_' || md5(gen_random_uuid()::text || gen_random_uuid()::text),
  only_follower text,
  quota_bytes bigint,
  used_bytes bigint not null default 0,
  history_quota_bytes bigint,
  root_mode int not null default 493,
  root_uid bigint,
  root_gid bigint,
  root_mtime_ns bigint not null default (extract(epoch from clock_timestamp()) * 1000000)::bigint * 1000,
  primary key (tenant_id, agent_id)
);

-- Sessions that a mount was opened for. ended_at null: still running as far as anyone said.
create table agent_sessions (
  tenant_id uuid not null references tenants (id) on delete cascade,
  agent_id uuid not null references agents (id) on delete cascade,
  session text not null,
  principal text not null,
  created_at timestamptz not null default now(),
  ended_at timestamptz,
  primary key (tenant_id, agent_id, session)
);

-- Numbers of incarnations. Below 1024: directories that exist in a mount only. Below 2^39: a mount
-- keeps bit 39 for the files of its control directory, and the number of a session above bit 40.
create sequence fusefs_ino as bigint minvalue 1024 maxvalue 549755813887 start 1024;

-- Who wrote a row or deletes it, for the triggers: set by our statements for one transaction.
create function fusefs_setting_v1(p_name text) returns text
  language sql stable parallel safe
  as $$ select nullif(current_setting('fusefs.' || p_name, true), '') $$;

create function fusefs_parent_v1(p_path text) returns text
  language sql immutable parallel safe
  as $$ select greatest(left(p_path, -1 - length(split_part(p_path, '/', -1))), '/' collate "C") $$;

create function fusefs_now_ns_v1() returns bigint
  language sql volatile
  as $$ select (extract(epoch from clock_timestamp()) * 1000000)::bigint * 1000 $$;

-- The lines of a text with their numbers from 1. A line ends with LF or CR LF and with nothing else.
create function fusefs_lines_v1(p_content text) returns table (line text, number bigint)
  language sql immutable parallel safe
  as $$
    select line, number from string_to_table(
      regexp_replace(replace(p_content, E'\r\n', E'\n'), E'\n\\Z', ''), E'\n') with ordinality as s (line, number)
  $$;

-- What would be CHECK constraints of the tables: Postgres parses those of a table again for each statement (a tenth of a
-- commit's time), those of a type once.
create domain fusefs_kind as text check (value in ('file', 'dir', 'symlink', 'fifo', 'socket'));
create domain fusefs_mode as int check (value between 0 and 4095);
create domain fusefs_version as int check (value >= 0);
create domain fusefs_old_state as text check (value in ('none', 'text', 'bytes', 'prefix', 'coalesced', 'dropped'));

-- One row per path.
--   id             the lineage: survives edits, renames, and being replaced by a rename over it
--   content        the text; '' where content_bytes is set; the target of a symlink
--   content_bytes  content that is not UTF-8 text without NUL
--   size_bytes     bytes of the content, kept by trigger
--   version        +1 for each change of content, kept by trigger; 0: a claimed name, not written yet
--                  (a claim that goes on with a deleted lineage has the version of the delete)
--   ino            the incarnation: what an inode number and an open handle stand for
--   parent         path of the directory, '/' at the top, kept by trigger (a generated column is parsed again for each statement)
--   mode           permission bits (07777); uid, gid null: whoever mounts
--   updated_at     of any change, shown as ctime; mtime_ns of the content, as utimensat(2) sets it
--   updated_by     principal, or 'sql:<role>' for a writer that knows only the seed's columns
--   write_id       of the newest change of content; unique in the history, so a retry cannot apply twice
--   write_op       what that change was: claim (a name without content yet), create, write, append,
--                  rename, restore
--   write_handle   the open handle that made it, null outside a mount
create table agent_files (
  id uuid not null default gen_random_uuid(),
  tenant_id uuid not null,
  agent_id uuid not null,
  path text collate "C" not null,
  content text not null,
  size_bytes int not null default 0,
  version fusefs_version not null default 1,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  kind fusefs_kind not null default 'file',
  ino bigint not null default nextval('fusefs_ino'),
  parent text collate "C" not null,
  mode fusefs_mode not null default 420,
  uid bigint,
  gid bigint,
  mtime_ns bigint not null default (extract(epoch from clock_timestamp()) * 1000000)::bigint * 1000,
  content_bytes bytea,
  updated_by text not null default 'sql:' || session_user,
  updated_session text not null default '',
  write_id uuid not null default gen_random_uuid(),
  write_op text not null default 'create',
  write_handle bigint,
  primary key (id, tenant_id),
  unique (agent_id, tenant_id, path),
  -- One look-up for each new file instead of two: the namespace has the foreign keys to the tenant and the agent.
  foreign key (tenant_id, agent_id) references agent_namespaces (tenant_id, agent_id) on delete cascade
) with (
  -- One file rewritten or appended to all day is not a fifth of the table; a chunk of TOAST is 2 KB. See docs/internals/schema.md.
  autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_limit = 2000,
  toast.autovacuum_vacuum_threshold = 10000, toast.autovacuum_vacuum_scale_factor = 0.05,
  toast.autovacuum_vacuum_cost_limit = 2000
);
-- No two indexes of a table begin with the same column. Before the first ANALYZE the planner believes that a tenant, or a
-- tenant and an agent, is one row, reads the whole tenant through whichever index begins so, and keeps that plan until
-- the next ANALYZE (measured: 1 ms for each statement of a namespace of 4000 files). For the same reason statements that
-- look a row up by id compare the agent with `is not distinct from`, which no index serves.
create index agent_files_parent_idx on agent_files (parent, tenant_id, agent_id);

-- One row per change, by trigger, whoever made it.
--   version      the version that the change made; a delete takes the next number
--   op           create, write, append, rename, restore, delete, moved (the source of a rename over)
--   old_state    what became of the superseded content:
--                  none       there was none
--                  text       in old_content         bytes      in old_bytes
--                  prefix     the first old_size bytes of the next version (an append)
--                  coalesced  made and superseded through one open handle within 60 s: not kept
--                  dropped    removed by retention
--   write_id     of the change; unique
create table agent_file_versions (
  tenant_id uuid not null,
  agent_id uuid not null,
  file_id uuid not null,
  version int not null,
  seq bigint generated always as identity,
  at timestamptz not null default clock_timestamp(),
  op text not null,
  kind text not null,
  path text collate "C" not null,
  old_path text collate "C",
  size_bytes int not null,
  mode int not null,
  updated_by text not null,
  updated_session text not null,
  write_id uuid not null,
  old_state fusefs_old_state not null default 'none',
  old_size int not null default 0,
  old_content text,
  old_bytes bytea,
  primary key (file_id, version, seq, tenant_id),
  unique (write_id, tenant_id)
) with (
  -- Rows die here only when retention drops them or their contents, many at once.
  autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_limit = 2000,
  toast.autovacuum_vacuum_threshold = 10000, toast.autovacuum_vacuum_scale_factor = 0.05,
  toast.autovacuum_vacuum_cost_limit = 2000
);
create index agent_file_versions_path_idx on agent_file_versions (agent_id, tenant_id, path);

-- The bytes of lost races, until someone accepts or drops them.
--   file_id           the lineage that was to be written; null: a new file
--   expected_version  what the writer built on, null: no file; actual_version: what it met
create table agent_file_conflicts (
  id uuid not null default gen_random_uuid(),
  tenant_id uuid not null references tenants (id) on delete cascade,
  agent_id uuid not null references agents (id) on delete cascade,
  file_id uuid,
  path text collate "C" not null,
  expected_version int,
  actual_version int,
  op text not null,
  content bytea not null,
  session text not null,
  principal text not null,
  at timestamptz not null default now(),
  primary key (tenant_id, id)
);
create index agent_file_conflicts_path_idx on agent_file_conflicts (tenant_id, agent_id, path);

do $$
declare
  t text;
  col text;
begin
  -- lz4 costs tar x a third less than pglz; a server built without it keeps its default.
  foreach t in array array['agent_files.content', 'agent_files.content_bytes',
                           'agent_file_versions.old_content', 'agent_file_versions.old_bytes'] loop
    begin
      execute format('alter table %I alter column %I set compression lz4', split_part(t, '.', 1), split_part(t, '.', 2));
    exception when feature_not_supported then null;
    end;
  end loop;
  foreach t in array array['agent_namespaces', 'agent_sessions', 'agent_files', 'agent_file_versions',
                           'agent_file_conflicts'] loop
    execute format('alter table %I enable row level security', t);
    -- No setting: no rows (fail closed). No sub-select around the setting: its plan is set up for each statement, those in
    -- the triggers too (a tenth of a commit), and with a tenant named in the query the comparison is made once anyway.
    execute format('create policy tenant_isolation on %I using (tenant_id = '
                   'nullif(current_setting(''fusefs.tenant'', true), '''')::uuid)', t);
    execute format('grant select, insert, update, delete on %I to fusefs_daemon', t);
  end loop;
end
$$;
grant select on tenants, agents to fusefs_daemon;
-- A namespace goes with its agent, and its files with it.
revoke delete on agent_namespaces from fusefs_daemon;
grant usage on sequence fusefs_ino to fusefs_daemon;

-- Follow a namespace: called on the connection that listens on its channel, in the transaction of LISTEN and before
-- anything is loaded; again (p_again) when it may have become the only one. While one program alone follows, its own
-- changes are not announced.
-- Who follows holds the lock of presence, shared, for as long as its connection lives, so the server itself knows
-- who is gone. A writer of ours holds the lock of silence, shared, from before it looks whether it is alone until its change
-- is visible; who ends another's silence takes it exclusively: what was not announced is there to be loaded
-- afterwards.
-- The only follower may claim names late (p_late): it holds the third lock, shared, for as long as it does. Whoever is not
-- the only one shows nothing until nobody has that; a follower who comes is announced for this.
-- Returns 'alone' or 'shared'; 'busy', and nothing was done, where a change took longer than 100 ms, since whoever waits
-- here hears nothing meanwhile; null where there is no such namespace.
create function fusefs_follow_v1(p_tenant uuid, p_agent uuid, p_origin text, p_again boolean, p_late boolean)
  returns text language plpgsql set lock_timeout = '100ms' as $$
declare
  v_presence bigint := uuid_hash_extended(p_agent, 1);
  v_came boolean := false;
  v_alone boolean;
  v_channel text;
  v_only text;
begin
  if not exists (select from agent_namespaces where tenant_id = p_tenant and agent_id = p_agent) then
    return null;
  end if;
  begin
    if not p_again then
      perform pg_advisory_lock_shared(v_presence);
      v_came := true;
    end if;
    -- Exclusive beside one's own shared one: nobody else has it, and nobody comes until this transaction ends.
    v_alone := pg_try_advisory_xact_lock(v_presence);
    select channel, only_follower into v_channel, v_only from agent_namespaces
      where tenant_id = p_tenant and agent_id = p_agent;
    if v_alone and v_only is null then
      -- Quiet is only faster: nobody waits for it who finds the row locked, as by each change where there is a quota.
      perform from agent_namespaces where tenant_id = p_tenant and agent_id = p_agent for update skip locked;
      v_alone := found;
    end if;
    if not v_alone and (v_only is not null or not p_again) then
      perform pg_notify(v_channel, json_build_array(p_origin, 'follow')::text);
    end if;
    if v_only is distinct from (case when v_alone then p_origin end) then
      if v_only is not null then
        perform pg_advisory_xact_lock(uuid_hash_extended(p_agent, 2));
      end if;
      update agent_namespaces set only_follower = case when v_alone then p_origin end
        where tenant_id = p_tenant and agent_id = p_agent;
    end if;
    -- Last: a rollback keeps the locks of a session.
    if v_alone and p_late then
      perform pg_advisory_lock_shared(uuid_hash_extended(p_agent, 3));
    end if;
  exception when lock_not_available or deadlock_detected then
    if v_came then
      perform pg_advisory_unlock_shared(v_presence);
    end if;
    return 'busy';
  end;
  return case when v_alone then 'alone' else 'shared' end;
end
$$;

-- Charge a change to the namespace's quota (raises FS009), and tell the mounts: both need the namespace's row. Here and in the triggers a function is called by an assignment, which plpgsql evaluates by
-- itself; `perform` would start the executor for each. An announcement is a hint: it can invalidate, it grants nothing, it carries no
-- content. NOTIFY refuses 8000 bytes and would abort the writer: the finished payload is measured.
-- Nobody is told where nobody else follows: without NOTIFY, which wakes a process and holds one lock of the server from before the
-- commit until the log is on disk, a commit takes 0.7 to 0.8 of the time. The move of a directory is told in any case: its
-- own mount takes it in its turn among others' announcements.
create function fusefs_announce_v1(
  p_tenant uuid, p_agent uuid, p_op text, p_path text, p_old_path text, p_id uuid, p_kind text, p_ino bigint,
  p_version int, p_size int, p_mode int, p_uid bigint, p_gid bigint, p_mtime_ns bigint, p_updated_at timestamptz,
  p_session text, p_old int, p_growth int
) returns boolean language plpgsql as $$
declare
  v_origin text := coalesce(current_setting('fusefs.origin', true), '');
  v_channel text;
  v_only text;
  v_quota bigint;
  v_used bigint;
  v_payload text;
  v_sent text;
begin
  if v_origin <> '' then
    v_sent := pg_advisory_xact_lock_shared(uuid_hash_extended(p_agent, 2));
  end if;
  select channel, only_follower, quota_bytes into v_channel, v_only, v_quota from agent_namespaces
    where tenant_id = p_tenant and agent_id = p_agent;
  if not found then
    return false;
  end if;
  if v_quota is not null and p_growth <> 0 then
    -- Locks the row until the end of the transaction: writers of a namespace with a quota go one after the other.
    update agent_namespaces set used_bytes = used_bytes + p_growth
      where tenant_id = p_tenant and agent_id = p_agent returning used_bytes into v_used;
    if p_growth > 0 and v_used > v_quota then
      raise exception '% bytes, the quota is %', v_used, v_quota using errcode = 'FS009';
    end if;
  end if;
  if v_only = v_origin and v_origin <> '' and (p_op in ('put', 'delete') or p_op = 'rename' and p_kind <> 'dir') then
    return true;
  end if;
  v_payload := json_build_array(v_origin, p_op, p_path, p_old_path, p_id,
    p_kind, p_ino, p_version, p_size, p_mode, p_uid, p_gid, p_mtime_ns,
    (extract(epoch from p_updated_at) * 1000000)::bigint * 1000, p_session, p_old)::text;
  if octet_length(v_payload) > 7900 then
    v_payload := json_build_array(v_origin, 'reload')::text;
  end if;
  v_sent := pg_notify(v_channel, v_payload);
  return true;
end
$$;

-- Make a directory and those above it. For writers that know only paths.
create function fusefs_make_parents_v1(p_tenant uuid, p_agent uuid, p_path text) returns void
  language plpgsql as $$
begin
  if p_path = '/' then
    return;
  end if;
  -- The insert's own trigger makes the next level up.
  insert into agent_files (tenant_id, agent_id, path, content, kind, mode, updated_by, updated_session)
    values (p_tenant, p_agent, p_path, '', 'dir', 493,
            coalesce(fusefs_setting_v1('by'), 'sql:' || session_user),
            coalesce(fusefs_setting_v1('session'), ''))
    on conflict (tenant_id, agent_id, path) do nothing;
end
$$;

-- Lock the parent of a path against removal until the transaction ends. Raises FS003 where it is not a
-- directory. A missing one is made for a foreign writer; a writer of ours is told (FS001), since the
-- directory was there when it began and someone has removed or moved it.
create function fusefs_lock_parent_v1(p_tenant uuid, p_agent uuid, p_path text) returns void
  language plpgsql as $$
declare
  v_parent text := fusefs_parent_v1(p_path);
  v_kind text;
begin
  if v_parent = '/' then
    return;
  end if;
  select kind into v_kind from agent_files
    where tenant_id = p_tenant and agent_id = p_agent and path = v_parent for key share;
  if not found then
    if fusefs_setting_v1('origin') is not null and fusefs_setting_v1('make_parents') is null then
      raise exception 'the directory does not exist' using errcode = 'FS001';
    end if;
    perform fusefs_make_parents_v1(p_tenant, p_agent, v_parent);
    select kind into v_kind from agent_files
      where tenant_id = p_tenant and agent_id = p_agent and path = v_parent for key share;
  end if;
  if v_kind is distinct from 'dir' then
    raise exception 'not a directory' using errcode = 'FS003';
  end if;
end
$$;

create function fusefs_before_insert_v1() returns trigger language plpgsql as $$
declare
  v_parent text := fusefs_parent_v1(new.path);
begin
  if new.path ~ '^([^/]|$)|//|/$|/\.\.?(/|$)' then
    raise exception 'the path is not absolute and normalised' using errcode = 'FS010';
  end if;
  if new.content_bytes is null then
    new.size_bytes := octet_length(new.content);
  else
    new.content := '';
    new.size_bytes := octet_length(new.content_bytes);
  end if;
  new.parent := v_parent;
  if v_parent <> '/' then
    -- The common case without another call; see fusefs_lock_parent_v1.
    perform from agent_files
      where tenant_id = new.tenant_id and agent_id = new.agent_id and path = v_parent and kind = 'dir' for key share;
    if not found then
      perform fusefs_lock_parent_v1(new.tenant_id, new.agent_id, new.path);
    end if;
  else
    -- Where there is a directory there is a namespace.
    perform from agent_namespaces where tenant_id = new.tenant_id and agent_id = new.agent_id;
    if not found then
      insert into agent_namespaces (tenant_id, agent_id) values (new.tenant_id, new.agent_id) on conflict do nothing;
    end if;
  end if;
  return new;
end
$$;
create trigger fusefs_before_insert before insert on agent_files
  for each row execute function fusefs_before_insert_v1();

create function fusefs_before_path_v1() returns trigger language plpgsql as $$
begin
  new.parent := fusefs_parent_v1(new.path);
  return new;
end
$$;
-- Where the statement itself gives the right parent (the one of fusefs_parent_v1, a call of which would be parsed for each
-- statement), as a directory's rename does for each row below it, there is nothing to start.
create trigger fusefs_before_path before update of path, parent on agent_files
  for each row when (new.parent is distinct from greatest(left(new.path, -1 - length(split_part(new.path, '/', -1))), '/'))
  execute function fusefs_before_path_v1();

-- Keeps (id, version) honest. A writer of ours brings a new write_id, so contents need comparing only
-- for the others.
create function fusefs_before_content_v1() returns trigger language plpgsql as $$
begin
  if new.write_id = old.write_id then
    if new.content is not distinct from old.content and new.content_bytes is not distinct from old.content_bytes then
      return new;
    end if;
    if new.content is distinct from old.content and new.content_bytes is not distinct from old.content_bytes then
      new.content_bytes := null;
    end if;
    if fusefs_setting_v1('origin') is not null then
      -- A writer of ours, whose change is the newest already: the history's unique key would not see it.
      raise exception 'the change was applied already' using errcode = 'unique_violation';
    end if;
    new.write_id := gen_random_uuid();
    new.write_op := 'write';
    new.write_handle := null;
    new.updated_by := 'sql:' || session_user;
    new.updated_session := '';
    new.updated_at := clock_timestamp();
    if new.mtime_ns = old.mtime_ns then
      new.mtime_ns := fusefs_now_ns_v1();
    end if;
  end if;
  if new.content_bytes is null then
    new.size_bytes := octet_length(new.content);
  else
    new.content := '';
    new.size_bytes := octet_length(new.content_bytes);
  end if;
  -- The same content again is no new version, only a new time.
  if new.size_bytes = old.size_bytes and old.write_op <> 'claim' and new.write_op <> 'rename'
     and new.content = old.content and new.content_bytes is not distinct from old.content_bytes then
    new.version := old.version;
    new.write_id := old.write_id;
    new.write_op := old.write_op;
    new.write_handle := old.write_handle;
    new.updated_by := old.updated_by;
    new.updated_session := old.updated_session;
    return new;
  end if;
  new.version := old.version + 1;
  return new;
end
$$;
create trigger fusefs_before_content before update of content, content_bytes on agent_files
  for each row execute function fusefs_before_content_v1();

create function fusefs_after_insert_v1() returns trigger language plpgsql as $$
declare
  v_told boolean;
begin
  if new.write_op <> 'claim' and new.kind <> 'dir' then
    insert into agent_file_versions (tenant_id, agent_id, file_id, version, op, kind, path, size_bytes, mode,
        updated_by, updated_session, write_id)
      values (new.tenant_id, new.agent_id, new.id, new.version, new.write_op, new.kind, new.path, new.size_bytes,
        new.mode, new.updated_by, new.updated_session, new.write_id);
  end if;
  v_told := fusefs_announce_v1(new.tenant_id, new.agent_id, 'put', new.path, null, new.id, new.kind, new.ino,
    new.version, new.size_bytes, new.mode, new.uid, new.gid, new.mtime_ns, new.updated_at, new.updated_session, null, new.size_bytes);
  return null;
end
$$;
create trigger fusefs_after_insert after insert on agent_files
  for each row execute function fusefs_after_insert_v1();

-- Changes of content and of attributes. There is no WHEN: Postgres parses it again for each statement (a tenth of a commit).
create function fusefs_after_update_v1() returns trigger language plpgsql as $$
declare
  v_told boolean;
  v_state text;
  v_rename boolean;
begin
  if new.version <> old.version then
    v_rename := new.write_op = 'rename';
    if old.write_op = 'claim' then
      v_state := 'none';
    elsif new.write_op = 'append' then
      v_state := 'prefix';
    elsif new.write_handle = old.write_handle and new.updated_at - old.updated_at < interval '60 s' then
      v_state := 'coalesced';
    elsif old.content_bytes is not null then
      v_state := 'bytes';
    else
      v_state := 'text';
    end if;
    insert into agent_file_versions (tenant_id, agent_id, file_id, version, op, kind, path, old_path, size_bytes, mode,
        updated_by, updated_session, write_id, old_state, old_size, old_content, old_bytes)
      values (new.tenant_id, new.agent_id, new.id, new.version,
        case when old.write_op = 'claim' then 'create' else new.write_op end,
        new.kind, new.path, case when v_rename then fusefs_setting_v1('old_path') end, new.size_bytes, new.mode,
        new.updated_by, new.updated_session, new.write_id, v_state, old.size_bytes,
        case when v_state = 'text' then old.content end, case when v_state = 'bytes' then old.content_bytes end);
    if v_rename then
      return null;  -- fusefs_rename_v1 tells it
    end if;
  elsif new.path <> old.path or current_setting('fusefs.quiet', true) = 'on' then
    return null;
  end if;
  v_told := fusefs_announce_v1(new.tenant_id, new.agent_id, 'put', new.path, null, new.id, new.kind, new.ino,
    new.version, new.size_bytes, new.mode, new.uid, new.gid, new.mtime_ns, new.updated_at, new.updated_session, old.size_bytes,
    new.size_bytes - old.size_bytes);
  return null;
end
$$;
create trigger fusefs_after_update
  after update of content, content_bytes, mode, uid, gid, mtime_ns, kind, ino on agent_files
  for each row execute function fusefs_after_update_v1();

-- Moves by others. fusefs_rename_v1 checks and announces once for a whole tree.
create function fusefs_after_path_v1() returns trigger language plpgsql as $$
declare
  v_told boolean;
begin
  if new.path = old.path then
    return null;
  end if;
  perform fusefs_lock_parent_v1(new.tenant_id, new.agent_id, new.path);
  if old.kind = 'dir' then
    if exists (select from agent_files where tenant_id = old.tenant_id and agent_id = old.agent_id and parent = old.path) then
      raise exception 'a directory moves with what is in it' using errcode = 'FS005';
    end if;
  end if;
  v_told := fusefs_announce_v1(new.tenant_id, new.agent_id, 'rename', new.path, old.path, new.id, new.kind, new.ino,
    new.version, new.size_bytes, new.mode, new.uid, new.gid, new.mtime_ns, new.updated_at, new.updated_session, old.version, 0);
  return null;
end
$$;
create trigger fusefs_after_path after update of path on agent_files
  for each row when (current_setting('fusefs.quiet', true) is distinct from 'on') execute function fusefs_after_path_v1();

create function fusefs_after_delete_v1() returns trigger language plpgsql as $$
declare
  v_told boolean;
  v_op text := coalesce(fusefs_setting_v1('delete_op'), 'delete');
  v_keep boolean := old.write_op <> 'claim' and old.kind <> 'dir' and v_op = 'delete';
begin
  -- The agent itself is being deleted: its history goes too. First, since whoever does that may have no rights here.
  if not exists (select from agents where id = old.agent_id) then
    return null;
  end if;
  -- An IF with a query in it starts the executor whatever stands before the query, so it is an IF of its own.
  if old.kind = 'dir' then
    if exists (select from agent_files where tenant_id = old.tenant_id and agent_id = old.agent_id and parent = old.path) then
      raise exception 'the directory is not empty' using errcode = 'FS005';
    end if;
  end if;
  if old.version > 0 then
    insert into agent_file_versions (tenant_id, agent_id, file_id, version, op, kind, path, old_path, size_bytes, mode,
        updated_by, updated_session, write_id, old_state, old_size, old_content, old_bytes)
      values (old.tenant_id, old.agent_id, old.id, old.version + 1, v_op, old.kind, old.path,
        null, 0, old.mode,
        coalesce(fusefs_setting_v1('by'), 'sql:' || session_user), coalesce(fusefs_setting_v1('session'), ''),
        coalesce(fusefs_setting_v1('delete_id')::uuid, gen_random_uuid()),
        case when not v_keep then 'none' when old.content_bytes is not null then 'bytes' else 'text' end,
        old.size_bytes,
        case when v_keep and old.content_bytes is null then old.content end,
        case when v_keep then old.content_bytes end);
  end if;
  if v_op = 'delete' then
    v_told := fusefs_announce_v1(old.tenant_id, old.agent_id, 'delete', old.path, null, old.id, old.kind, old.ino,
    old.version + 1, old.size_bytes, old.mode, old.uid, old.gid, old.mtime_ns, old.updated_at, old.updated_session, old.size_bytes,
    -old.size_bytes);
  end if;
  return null;
end
$$;
create trigger fusefs_after_delete after delete on agent_files
  for each row execute function fusefs_after_delete_v1();

-- History has no foreign key: two look-ups less for each commit.
-- The only function with the owner's rights, since whoever deletes an agent may have none on its history. So it is
-- nobody's to call (as the trigger of a caller's own table it would purge anybody's history), and temporary tables
-- come last in its search path (a caller's own one of that name would run the caller's triggers as the owner).
create function fusefs_purge_history_v1() returns trigger language plpgsql security definer as $$
begin
  delete from agent_file_versions where tenant_id = old.tenant_id and agent_id = old.id;
  return null;
end
$$;
revoke execute on function fusefs_purge_history_v1() from public;
do $$
begin
  execute format('alter function fusefs_purge_history_v1() set search_path = %I, pg_temp', current_schema());
end
$$;
create trigger fusefs_purge_history after delete on agents
  for each row execute function fusefs_purge_history_v1();

-- Raise the mtime of directories by id; never lowers one. One after the other: as a join it would read the whole
-- tenant before the first ANALYZE.
create function fusefs_touch_v1(p_tenant uuid, p_agent uuid, p_ids uuid[], p_mtimes_ns bigint[]) returns void
  language plpgsql as $$
begin
  for i in 1 .. cardinality(p_ids) loop
    update agent_files set mtime_ns = p_mtimes_ns[i]
      where tenant_id = p_tenant and agent_id is not distinct from p_agent and id = p_ids[i] and kind = 'dir'
      and mtime_ns < p_mtimes_ns[i];
  end loop;
end
$$;

-- Mode, owner and mtime of rows by id; null leaves a column alone. What is gone has no row in the answer. One after the
-- other, as above. Without p_wait a row that another transaction has locked is left as it is, and said to be locked: who
-- sets many must not wait for one while it holds the others.
create function fusefs_set_attrs_v1(
  p_tenant uuid, p_agent uuid, p_ids uuid[], p_modes int[], p_uids bigint[], p_gids bigint[], p_mtimes_ns bigint[],
  p_wait boolean
) returns table (
  id uuid, path text, kind text, ino bigint, version int, size_bytes int, mode int, uid bigint, gid bigint, mtime_ns bigint,
  ctime_ns bigint, updated_session text, locked boolean
) language plpgsql as $$
#variable_conflict use_column
begin
  for i in 1 .. cardinality(p_ids) loop
    if not p_wait then
      perform from agent_files
        where tenant_id = p_tenant and agent_id is not distinct from p_agent and id = p_ids[i]
        for no key update skip locked;
      if not found then
        return query select id, path::text, kind::text, ino, version::int, size_bytes, mode::int, uid, gid, mtime_ns,
            (extract(epoch from updated_at) * 1000000)::bigint * 1000, updated_session, true
          from agent_files
          where tenant_id = p_tenant and agent_id is not distinct from p_agent and id = p_ids[i];
        continue;
      end if;
    end if;
    return query update agent_files set mode = coalesce(p_modes[i], mode), uid = coalesce(p_uids[i], uid),
        gid = coalesce(p_gids[i], gid), mtime_ns = coalesce(p_mtimes_ns[i], mtime_ns), updated_at = clock_timestamp()
      where tenant_id = p_tenant and agent_id is not distinct from p_agent and id = p_ids[i]
      returning id, path::text, kind::text, ino, version::int, size_bytes, mode::int, uid, gid, mtime_ns,
        (extract(epoch from updated_at) * 1000000)::bigint * 1000, updated_session, false;
  end loop;
end
$$;

-- Set quotas in bytes: null leaves one alone, -1 removes it. What is used is counted while nobody writes.
create function fusefs_set_quotas_v1(p_tenant uuid, p_agent uuid, p_quota bigint, p_history_quota bigint) returns void
  language plpgsql set lock_timeout = '5s' as $$
begin
  if p_quota >= 0 then
    lock table agent_files in share row exclusive mode;
  end if;
  update agent_namespaces set
    quota_bytes = case p_quota when -1 then null else coalesce(p_quota, quota_bytes) end,
    history_quota_bytes = case p_history_quota when -1 then null else coalesce(p_history_quota, history_quota_bytes) end,
    used_bytes = case when p_quota >= 0 then (select coalesce(sum(size_bytes), 0) from agent_files
      where tenant_id = p_tenant and agent_id = p_agent) else used_bytes end
    where tenant_id = p_tenant and agent_id = p_agent;
end
$$;

-- Move a row, and what lies below it.
create function fusefs_move_v1(p_tenant uuid, p_agent uuid, p_kind text, p_from text, p_to text) returns void
  language plpgsql as $$
begin
  update agent_files set path = p_to, parent = fusefs_parent_v1(p_to), updated_at = clock_timestamp()
    where tenant_id = p_tenant and agent_id = p_agent and path = p_from;
  if p_kind = 'dir' then
    -- Again until nothing is left: an insert that held its directory's lock when the first pass began is
    -- not in that pass's snapshot. New ones wait for the locks of the rows that moved.
    loop
      update agent_files set
          path = p_to || substr(path, length(p_from) + 1), parent = p_to || substr(parent, length(p_from) + 1)
        where tenant_id = p_tenant and agent_id = p_agent and path >= p_from || '/' and path < p_from || '0';
      exit when not found;
    end loop;
  end if;
end
$$;

-- Refuse a move that would make a path below it too long or too deep. Raises FS012.
create function fusefs_check_depth_v1(
  p_tenant uuid, p_agent uuid, p_kind text, p_from text, p_to text, p_max_path int, p_max_depth int
) returns void language plpgsql as $$
declare
  v_longest int;
  v_deepest int;
begin
  if p_kind <> 'dir' then
    return;
  end if;
  select max(octet_length(path)), max(length(path) - length(replace(path, '/', ''))) into v_longest, v_deepest
    from agent_files where tenant_id = p_tenant and agent_id = p_agent
    and path >= p_from || '/' and path < p_from || '0';
  if v_longest - octet_length(p_from) + octet_length(p_to) > p_max_path
     or v_deepest - (length(p_from) - length(replace(p_from, '/', '')))
        + (length(p_to) - length(replace(p_to, '/', ''))) > p_max_depth then
    raise exception 'a path below would be too long or too deep' using errcode = 'FS012';
  end if;
end
$$;

-- rename(2) in all its forms, atomic, one announcement.
--   p_source        lineage that must be at p_from
--   p_target        lineage that the caller believes at p_to, null: none
--   p_expected      version of the target that the caller has seen, null: it never saw one
--   p_mode          '' | 'noreplace' | 'exchange'
-- Replacing keeps the target's lineage and gives it the source's incarnation and content.
-- Raises FS001 source or directory gone, FS002 noreplace, or another file than p_target is there, FS003/4/5 kinds, FS006 the target moved on,
-- FS010 into itself, FS012 too deep. Returns the row now at p_to, and at which version the source was.
create function fusefs_rename_v1(
  p_tenant uuid, p_agent uuid, p_source uuid, p_from text, p_to text, p_target uuid, p_expected int, p_mode text,
  p_by text, p_session text, p_write_id uuid, p_max_path int, p_max_depth int
) returns table (
  id uuid, path text, kind text, ino bigint, version int, size_bytes int, mode int, uid bigint, gid bigint, mtime_ns bigint,
  ctime_ns bigint, updated_session text, moved int
) language plpgsql as $$
#variable_conflict use_column
declare
  v_set text;
  v_told boolean;
  s agent_files;
  d agent_files;
  v_parent text := fusefs_parent_v1(p_to);
  v_replaced boolean;
  v_replaced_size int := 0;
  v_spare text;
begin
  v_set := set_config('fusefs.quiet', 'on', true);
  v_set := set_config('fusefs.by', p_by, true);
  v_set := set_config('fusefs.session', p_session, true);
  v_set := set_config('fusefs.old_path', p_from, true);
  if p_to = p_from or left(p_to, length(p_from) + 1) = p_from || '/'
     or (p_mode = 'exchange' and left(p_from, length(p_to) + 1) = p_to || '/') then
    raise exception 'a directory cannot be moved into itself' using errcode = 'FS010';
  end if;
  if v_parent <> '/' and v_parent <> fusefs_parent_v1(p_from) then
    perform fusefs_lock_parent_v1(p_tenant, p_agent, p_to);
  end if;
  -- In the order of paths, so that two renames in opposite directions do not deadlock. One path at a time: for both at once
  -- the planner reads every file of a new database (Postgres 15).
  if p_from < p_to then
    select * into s from agent_files
      where tenant_id = p_tenant and agent_id = p_agent and path = p_from for update;
    select * into d from agent_files
      where tenant_id = p_tenant and agent_id = p_agent and path = p_to for update;
  else
    select * into d from agent_files
      where tenant_id = p_tenant and agent_id = p_agent and path = p_to for update;
    select * into s from agent_files
      where tenant_id = p_tenant and agent_id = p_agent and path = p_from for update;
  end if;
  if s.id is null or s.id <> p_source then
    raise exception 'no such file or directory' using errcode = 'FS001';
  end if;
  v_replaced := d.id is not null;
  if v_replaced and p_mode = 'noreplace' then
    raise exception 'the name exists already' using errcode = 'FS002';
  elsif not v_replaced and p_mode = 'exchange' then
    raise exception 'no such file or directory' using errcode = 'FS001';
  elsif v_replaced and p_mode = '' then
    if s.kind = 'dir' and d.kind <> 'dir' then
      raise exception 'not a directory' using errcode = 'FS003';
    elsif s.kind <> 'dir' and d.kind = 'dir' then
      raise exception 'is a directory' using errcode = 'FS004';
    end if;
    -- A name that the caller believes absent, or another file's, is not replaced before it has looked at what is there.
    if p_expected is null and s.kind <> 'dir' and d.id is distinct from p_target then
      raise exception 'another file has the name' using errcode = 'FS002';
    end if;
    if p_expected is not null and (d.id <> p_target or d.version <> p_expected) then
      raise exception 'changed since you read it; read it again and retry (it is at version % now)', d.version
        using errcode = 'FS006';
    end if;
  elsif not v_replaced and p_target is not null and p_expected is not null then
    raise exception 'deleted since you read it; read it again and retry' using errcode = 'FS006';
  end if;
  if s.kind = 'dir' then
    perform fusefs_check_depth_v1(p_tenant, p_agent, s.kind, p_from, p_to, p_max_path, p_max_depth);
  end if;
  if p_mode = 'exchange' then
    perform fusefs_check_depth_v1(p_tenant, p_agent, d.kind, p_to, p_from, p_max_path, p_max_depth);
  end if;

  if p_mode = 'exchange' then
    v_spare := '/.fusefs-exchange-' || p_write_id::text;
    perform fusefs_move_v1(p_tenant, p_agent, s.kind, p_from, v_spare);
    perform fusefs_move_v1(p_tenant, p_agent, d.kind, p_to, p_from);
    perform fusefs_move_v1(p_tenant, p_agent, s.kind, v_spare, p_to);
  elsif v_replaced and s.kind <> 'dir' then
    v_replaced_size := d.size_bytes;
    -- The source row goes first: its write_id row and the target's must not be the same one.
    v_set := set_config('fusefs.delete_op', 'moved', true);
    delete from agent_files where tenant_id = p_tenant and id = s.id;
    update agent_files set content = s.content, content_bytes = s.content_bytes, kind = s.kind, ino = s.ino,
        mode = s.mode, uid = s.uid, gid = s.gid, mtime_ns = s.mtime_ns, updated_at = clock_timestamp(),
        updated_by = p_by, updated_session = p_session, write_id = p_write_id, write_op = 'rename',
        write_handle = null
      where tenant_id = p_tenant and id = d.id returning * into d;
  else
    if v_replaced then
      delete from agent_files where tenant_id = p_tenant and id = d.id;
    end if;
    if s.kind = 'dir' then
      perform fusefs_move_v1(p_tenant, p_agent, s.kind, p_from, p_to);
    else
      update agent_files set path = p_to, parent = fusefs_parent_v1(p_to), updated_at = clock_timestamp()
        where tenant_id = p_tenant and id = s.id returning * into d;
    end if;
  end if;
  if not (v_replaced and p_mode = '' and s.kind <> 'dir') then
    insert into agent_file_versions (tenant_id, agent_id, file_id, version, op, kind, path, old_path, size_bytes, mode,
        updated_by, updated_session, write_id)
      values (p_tenant, p_agent, s.id, s.version, 'rename', s.kind, p_to, p_from, s.size_bytes, s.mode,
        p_by, p_session, p_write_id);
  end if;
  if s.kind = 'dir' or p_mode = 'exchange' then
    select * into d from agent_files where tenant_id = p_tenant and agent_id = p_agent and path = p_to;
  end if;
  v_told := fusefs_announce_v1(d.tenant_id, d.agent_id, case when p_mode = 'exchange' then 'exchange' else 'rename' end,
    d.path, p_from, d.id, d.kind, d.ino, d.version, d.size_bytes, d.mode, d.uid, d.gid, d.mtime_ns, d.updated_at,
    d.updated_session, s.version, -v_replaced_size);
  -- Field by field: a row as a whole would bring its content along.
  id := d.id; path := d.path; kind := d.kind; ino := d.ino; version := d.version; size_bytes := d.size_bytes;
  mode := d.mode; uid := d.uid; gid := d.gid; mtime_ns := d.mtime_ns;
  ctime_ns := (extract(epoch from d.updated_at) * 1000000)::bigint * 1000; updated_session := d.updated_session;
  moved := s.version;
  return next;
end
$$;
