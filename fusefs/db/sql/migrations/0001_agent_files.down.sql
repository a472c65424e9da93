-- Everything of 0001 but `tenants`, `agents` and their slugs, which may belong to another program, and
-- the role, which other databases of the server may use.
drop trigger fusefs_purge_history on agents;
drop function fusefs_rename_v1, fusefs_announce_v1, fusefs_follow_v1;
drop table agent_file_conflicts, agent_file_versions, agent_files, agent_sessions, agent_namespaces;
drop function fusefs_touch_v1, fusefs_set_attrs_v1, fusefs_set_quotas_v1, fusefs_move_v1, fusefs_check_depth_v1, fusefs_purge_history_v1, fusefs_after_delete_v1,
  fusefs_after_path_v1, fusefs_after_update_v1, fusefs_after_insert_v1, fusefs_before_content_v1,
  fusefs_before_insert_v1, fusefs_before_path_v1, fusefs_lines_v1, fusefs_lock_parent_v1, fusefs_make_parents_v1, fusefs_now_ns_v1, fusefs_parent_v1,
  fusefs_setting_v1;
drop domain fusefs_kind, fusefs_mode, fusefs_version, fusefs_old_state;
drop sequence fusefs_ino;
revoke all on tenants, agents from fusefs_daemon;
