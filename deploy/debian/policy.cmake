# What Debian's policy asks of each package, put into what is packed: copyright, changelogs, compressed manual pages.
foreach(component IN LISTS CPACK_COMPONENTS_ALL)
  set(tree ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/${component}/usr/share)
  set(package ${CPACK_REJOIN_PACKAGE_${component}})
  file(MAKE_DIRECTORY ${tree}/doc/${package})
  file(COPY_FILE ${CPACK_REJOIN_SOURCE}/deploy/debian/copyright ${tree}/doc/${package}/copyright)
  file(COPY_FILE ${CPACK_REJOIN_CHANGES} ${tree}/doc/${package}/changelog.Debian)
  file(COPY_FILE ${CPACK_REJOIN_SOURCE}/CHANGELOG.md ${tree}/doc/${package}/changelog)
  if(component STREQUAL "programs")
    file(GLOB pages ${CPACK_REJOIN_SOURCE}/docs/*.md)
    file(COPY ${pages} DESTINATION ${tree}/doc/${package})
    file(COPY ${CPACK_REJOIN_SOURCE}/deploy/kubernetes ${CPACK_REJOIN_SOURCE}/deploy/helm ${CPACK_REJOIN_SOURCE}/deploy/slurm
      ${CPACK_REJOIN_SOURCE}/deploy/prometheus ${CPACK_REJOIN_SOURCE}/deploy/grafana
      DESTINATION ${tree}/doc/${package}/examples)
  endif()
  file(GLOB texts ${tree}/doc/${package}/changelog* ${tree}/man/man*/*)
  foreach(text IN LISTS texts)
    execute_process(COMMAND gzip -9n ${text} COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
  # No more may write than root, whatever the umask of who builds.
  execute_process(COMMAND chmod -R go-w,a+rX ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/${component} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
